"""Guided requests on the GPU: the texts of the CPU backend, alone and together, whatever the cache holds."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from test_native_guided import Guided, few, mask, most
from test_native_parity import prompt

from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.select import create_engine

STEM = prompt(90)
PROMPTS = [STEM[: 9 + 16 * i] + prompt(3, seed=i) for i in range(6)]


def start(engine: Guided, i: int, **fields: Any) -> int:
    """The i-th request: every third is free, the others obey one rule or the other."""
    fields = {"temperature": 1.5, "seed": i, **fields}
    if i % 3 == 2:
        return engine.submit(PROMPTS[i], 40, **fields)
    return engine.guide(PROMPTS[i], 40, most if i % 3 else few, **fields)


def texts(store: Any, **config: Any) -> tuple[list[list[int]], Any]:
    """Of all requests together, twice: the second time, prompts are cached. And the engine's counts."""
    with Guided(store, **config) as engine:
        found = []
        for _ in range(2):
            requests = [start(engine, i) for i in range(6)]
            found += [engine.tokens(request) for request in requests]
        return found, engine.engine.metrics()


@pytest.mark.parametrize("policy", [0, 8])
def test_masks_give_the_cpu_backends_texts(policy: int, store: Any) -> None:
    pytest.importorskip("scipy_openblas64", reason="the CPU backend needs it")
    expected, _ = texts(store, quant_policy=policy)
    assert expected[:6] == expected[6:]
    config = {"device": "cuda", "quant_policy": policy}
    alone = []
    with Guided(store, **config) as engine:
        for i in range(6):
            alone.append(engine.tokens(start(engine, i)))
    assert alone == expected[:6]
    together, metrics = texts(store, **config)
    assert together == expected
    assert metrics.cached_tokens > 0
    without, metrics = texts(store, enable_prefix_caching=False, **config)
    assert without == expected
    assert metrics.cached_tokens == 0
    small, metrics = texts(store, cache_block_count=14, block_len=16, **config)
    assert small == expected
    assert metrics.preemptions > 0


@pytest.mark.parametrize("eager", [False, True])
def test_every_token_obeys_its_own_mask(eager: bool, store: Any) -> None:
    """Against argmax over the allowed logits of one full forward pass a token; recorded steps among them."""
    ids = prompt(9)
    with Guided(store, device="cuda", eager_mode=eager) as engine:
        free = engine.submit(ids, 300)
        got = engine.tokens(engine.guide(ids, 20, few))
        expected: list[int] = []
        for _ in range(20):
            logits = engine.logits(ids + expected)[-1]
            allowed = few(expected)
            expected.append(allowed[int(logits[allowed].argmax())])
        assert got == expected
        assert engine.tokens(free)[:20] != got


def test_logprobs_are_the_models_own_under_a_mask(store: Any) -> None:
    """And an empty mask ends the text."""
    with Guided(store, device="cuda") as engine:
        outputs = engine.wait(engine.guide(prompt(9), 12, few, logprobs=1))
        found = [p for output in outputs for p in output.logprobs]
        assert len(found) == 12
        assert any(p.top[0][1] > p.logprob for p in found)
        ends = engine.guide(prompt(5), 20, lambda out: few(out) if len(out) < 3 else [])
        assert (len(engine.tokens(ends)), engine.finish(ends)) == (3, "stop")
    assert mask([]) == b""


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 250}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(said: str) -> bool:
    found = json.loads(said)
    return set(found) == {"name", "age"} and type(found["age"]) is int and len(found["name"]) <= 4


FORMATS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}, is_person),
    (
        {"type": "regex_schema", "regex_schema": "(19|20)[0-9]{2}-[01][0-9]"},
        re.compile(r"\d{4}-[01]\d").fullmatch,
    ),
    ({"type": "grammar", "grammar": 'start: D ("+" D){1,5}\nD: /[0-9]/'}, re.compile(r"\d(\+\d)+").fullmatch),
    ({"type": "choice", "choice": ["yes", "no", 'maybe "é"']}, ["yes", "no", 'maybe "é"'].__contains__),
]


def said(store: Any, **config: Any) -> tuple[list[str], Any]:
    """Every format with three seeds, all together, then again; and the engine's counts."""
    fields = {"session_len": 256, "max_batch_size": 8, "cache_block_seq_len": 16}

    async def one(engine: Any, i: int) -> str:
        grammar = None if i == 12 else FORMATS[i % 4][0]
        gen = GenerationConfig(
            max_new_tokens=80, do_sample=True, temperature=1.2, top_k=0, seed=i, response_format=grammar
        )
        request = list(b"Say something that fits, please. " * 2) + [65 + i] * i
        return "".join([output.text async for output in engine.generate(request, gen)])

    async def all_of(engine: Any) -> list[str]:
        return await asyncio.gather(*[one(engine, i) for i in range(13)])

    with create_engine(store, EngineConfig(**(fields | config))) as engine:
        found = asyncio.run(all_of(engine)) + asyncio.run(all_of(engine))
        return found, engine.metrics()


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_grammars_give_the_texts_of_the_cpu(backend: str, tiny_store: Any) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("scipy_openblas64", reason="the CPU backend needs it")
    expected, _ = said(tiny_store, device="cpu", backend=backend, num_threads=2)
    assert all(FORMATS[i % 4][1](text) for i, text in enumerate(expected[:12])), expected
    found, metrics = said(tiny_store, device="cuda", backend=backend)
    assert found == expected
    assert metrics.cached_tokens > 0
    small, metrics = said(tiny_store, device="cuda", backend=backend, cache_max_entry_count=20)
    assert small == expected
    assert metrics.evictions > 0
