"""Draws, edits and log probabilities are the native engine's, number for number, and so are whole texts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch_models import text

from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.pytorch.engine import PytorchEngine
from turbomill.engine.pytorch.records import Request
from turbomill.engine.pytorch.rules import LogitRules
from turbomill.engine.pytorch.sampling import draw, logprobs

_core = pytest.importorskip("turbomill._core")

V = 300


def rows(count: int, seed: int = 0) -> np.ndarray:
    """Logits [count, V] with ties: a third of them are rounded to halves."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, V)).astype(np.float32)
    coarse = rng.random((count, V)) < 0.3
    return np.where(coarse, np.round(logits * 2) / 2, logits).astype(np.float32)


def request(**fields: Any) -> Request:
    return Request(**({"token_ids": [1], "max_new_tokens": 1} | fields))


def test_draws_are_the_native_samplers_in_any_batch() -> None:
    rng = np.random.default_rng(1)
    logits = rows(120)
    requests = [
        request(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
            top_k=int(rng.choice([0, 1, 2, 7, 50, 400])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.01])),
            min_p=float(rng.choice([0.0, 0.0, 0.05, 0.6, 1.0])),
            seed=int(rng.integers(0, 2**63)),
        )
        for _ in logits
    ]
    positions = rng.integers(1, 5000, len(logits)).tolist()
    expected = [
        _core.kernels.sample(row, r.temperature, r.top_k, r.top_p, r.seed, position, r.min_p)
        for row, r, position in zip(logits, requests, positions, strict=True)
    ]
    drawn = draw(torch.from_numpy(logits), requests, positions)
    assert drawn == expected
    assert len(set(expected)) > 60 and drawn != logits.argmax(1).tolist()
    alone = [draw(torch.from_numpy(logits[i : i + 1]), [requests[i]], [positions[i]])[0] for i in range(40)]
    assert alone == expected[:40]


def test_draws_follow_the_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    drawn = draw(logits, [request(temperature=1.0, seed=i) for i in range(4000)], [9] * 4000)
    shares = np.bincount(drawn, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_edits_are_the_native_ones() -> None:
    rng = np.random.default_rng(2)
    for seed in range(20):
        row = rows(1, seed)[0]
        row[5], row[6] = np.inf, np.nan  # of a broken model: they stay
        prompt, generated = rng.integers(0, 40, 9).tolist(), rng.integers(0, 40, 12).tolist()
        bias = {int(t): float(b) for t, b in zip(rng.integers(0, 60, 4), rng.normal(0, 5, 4), strict=True)}
        fields = {
            "repetition_penalty": float(rng.choice([1.0, 1.3, 0.7])),
            "presence_penalty": float(rng.choice([0.0, 0.7])),
            "frequency_penalty": float(rng.choice([0.0, 0.33, -0.2])),
        }
        words = [[generated[-1], 17], [generated[-2], generated[-1], 18], [3], [generated[-1] + 1, 19]]
        allowed = sorted(set(rng.integers(0, V, 200).tolist())) if seed % 2 else []
        made = request(
            token_ids=prompt,
            max_new_tokens=99,
            stop_token_ids=[44, 2**20],
            min_new_tokens=13,
            bad_words=words,
            allowed_token_ids=allowed,
            logit_bias_ids=list(bias),
            logit_biases=list(bias.values()),
            **fields,
        )
        rules = LogitRules(made, V, torch.device("cpu"))
        for count in (0, 5, 12):  # what is noted of the text grows
            got = rules.edit(torch.from_numpy(row), prompt + generated[:count], len(prompt)).numpy()
        penalised = any(value not in (0.0, 1.0) for value in fields.values())
        seen = set(prompt + generated) if penalised else set()
        banned = {44, 17, 18, 3}
        edits = [
            {
                "token": t,
                "count": generated.count(t) if penalised else 0,
                "bias": bias.get(t, 0.0),
                "seen": t in seen,
                "banned": t in banned,
            }
            for t in sorted(seen | set(bias) | banned)
        ]
        edits = [tuple(edit.values()) for edit in edits]
        expected = _core.kernels.edit_logits(
            row,
            fields["repetition_penalty"],
            fields["presence_penalty"],
            fields["frequency_penalty"],
            edits,
            [],
            allowed,
        )
        np.testing.assert_array_equal(got, expected)


def test_logprobs_are_the_native_ones() -> None:
    logits = rows(8)
    tokens = [3, 50, 299, 0, 7, 7, 9, 100]
    found = logprobs(torch.from_numpy(logits), tokens, 12)
    for row, token, ours in zip(logits, tokens, found, strict=True):
        logprob, top = _core.kernels.logprobs(row, token, 12)
        assert ours.logprob == pytest.approx(logprob, abs=1e-6)
        assert [t for t, _ in ours.top] == [t for t, _ in top]
        np.testing.assert_allclose([p for _, p in ours.top], [p for _, p in top], atol=1e-6)
    assert logprobs(torch.from_numpy(logits), tokens, 0)[0].top == []


RULES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 1.3, "top_k": 0},
    {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"do_sample": True, "temperature": 1.1, "logit_bias": {97: 2.0, 98: -3.0}, "frequency_penalty": 0.5},
    {"do_sample": True, "min_new_tokens": 20, "stop_token_ids": tuple(range(60, 90)), "temperature": 2.0},
    {"do_sample": True, "bad_token_ids": tuple(range(128)), "bad_words": ("é",), "temperature": 3.0},
    {"do_sample": True, "response_format": {"type": "regex_schema", "regex_schema": "[a-f0-9]{20}"}},
]


def test_the_same_seed_gives_the_same_text_on_both_engines(tiny_store: Any) -> None:
    from turbomill.engine.turbomind import TurbomindEngine

    config = EngineConfig(session_len=256, max_batch_size=8, num_threads=1, device="cpu")

    async def texts(engine: Any) -> list[tuple[list[int], str]]:
        async def one(i: int, rules: dict[str, Any]) -> tuple[list[int], str]:
            gen = GenerationConfig(max_new_tokens=40, seed=i, **rules)
            outputs = [output async for output in engine.generate(text(30 + i, seed=i), gen)]
            tokens = [token for output in outputs for token in output.token_ids]
            return tokens, str(outputs[-1].finish_reason)

        return await asyncio.gather(*[one(i, RULES[i % len(RULES)]) for i in range(2 * len(RULES))])

    found = []
    for kind in (TurbomindEngine, PytorchEngine):
        engine = kind(tiny_store, config)
        found.append(asyncio.run(texts(engine)))
        engine.close()
    assert found[0] == found[1]
    assert {why for _, why in found[0]} == {"stop", "length"}
