"""Guided requests: a token is drawn under its mask, and waits for it alone. The masks are made up here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_engine import Native, store_of, tiny_llama
from test_native_orchestration import harness, step, submit
from test_native_scheduling import prompt

V = 320
Rule = Callable[[list[int]], list[int]]  # the tokens that may follow those generated


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("guided") / "model"
    tiny_llama(path)
    return store_of(path)


def few(out: list[int]) -> list[int]:
    """Seven tokens that depend on all before."""
    return [(31 * i + 7 * sum(out) + len(out)) % V for i in range(7)]


def most(out: list[int]) -> list[int]:
    """Words of the mask that are full, and others that are not."""
    return [t for t in range(V) if (t // 32 + len(out)) % 3 or t % 2]


def mask(tokens: list[int]) -> bytes:
    bits = np.zeros(-(-V // 32) * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").tobytes() if tokens else b""


class Guided(Native):
    """Answers every token of a guided request with the next mask, on a thread that is not the engine's."""

    def __init__(self, store: Any, **config: Any) -> None:
        self.rules: dict[int, Rule] = {}
        self.lock = threading.Lock()
        super().__init__(store, **config)

    def guide(self, ids: list[int], new: int, rule: Rule, **fields: Any) -> int:
        with self.lock:
            request = self.submit(ids, new, guided=True, **fields)
            self.rules[request] = rule
            self.engine.allow(request, 0, mask(rule([])))
        return request

    def _on_outputs(self, outputs: list[Any]) -> None:
        super()._on_outputs(outputs)
        with self.lock:
            for output in outputs:
                if output.id in self.rules and not output.finish_reason:
                    out = [token for o in self.outputs[output.id] for token in o.token_ids]
                    self.engine.allow(output.id, len(out), mask(self.rules[output.id](out)))


@pytest.mark.parametrize("rule", [few, most])
def test_every_token_obeys_its_own_mask(store: Any, rule: Rule) -> None:
    """Against argmax over the allowed logits of one full forward pass a token."""
    ids = prompt(9)
    with Guided(store) as engine:
        got = engine.tokens(engine.guide(ids, 20, rule))
        expected: list[int] = []
        for _ in range(20):
            logits = engine.logits(ids + expected)[-1]
            allowed = rule(expected)
            expected.append(allowed[int(logits[allowed].argmax())])
        assert got == expected
        assert got != engine.generate(ids, 20)


def test_rules_count_beside_the_mask(store: Any) -> None:
    ids = prompt(9)
    with Guided(store) as engine:
        free = engine.tokens(engine.guide(ids, 12, few))
        biased = engine.tokens(
            engine.guide(ids, 12, few, logit_bias_ids=[free[0], 3], logit_biases=[-90, 90])
        )
        assert biased[0] != free[0]  # and token 3 comes only where it is allowed
        assert all(token in few(biased[:i]) for i, token in enumerate(biased))
        scored = engine.wait(engine.guide(ids, 12, few, logprobs=1))
        logprobs = [logprob for output in scored for logprob in output.logprobs]
        assert len(logprobs) == 12  # of the model's own logits, so something else is likelier
        assert any(p.top[0][1] > p.logprob for p in logprobs)


def test_an_empty_mask_ends_the_text(store: Any) -> None:
    with Guided(store) as engine:
        request = engine.guide(prompt(5), 20, lambda out: few(out) if len(out) < 3 else [])
        assert (len(engine.tokens(request)), engine.finish(request)) == (3, "stop")
        at_once = engine.guide(prompt(5), 20, lambda _: [])
        assert (engine.tokens(at_once), engine.finish(at_once)) == ([], "stop")
        none_set = engine.submit(prompt(5), 4, guided=True)
        engine.engine.allow(none_set, 0, bytes(40))
        assert engine.finish(none_set) == "stop"
        stopped = engine.guide(
            prompt(5), 20, lambda out: [7] if len(out) == 2 else [5, 6], stop_token_ids=[7]
        )
        assert (len(engine.tokens(stopped)), engine.finish(stopped)) == (2, "stop")
        assert engine.engine.metrics().running == 0


def test_seeds_decide_whatever_the_batch_and_the_pool(store: Any) -> None:
    """Guided and free requests together, in a pool in which they push each other out."""
    prompts = [prompt(n) for n in (5, 30, 17, 17, 40, 9)]
    fields = {"temperature": 1.5}

    def start(engine: Guided, i: int) -> int:
        if i % 3 == 2:
            return engine.submit(prompts[i], 50, seed=i, **fields)
        return engine.guide(prompts[i], 50, most if i % 3 else few, seed=i, **fields)

    with Guided(store, deterministic=True) as engine:
        alone = [engine.tokens(start(engine, i)) for i in range(6)]
    with Guided(store, deterministic=True, cache_block_count=14, block_len=16) as engine:
        requests = [start(engine, i) for i in range(6)]
        together = [engine.tokens(request) for request in requests]
        metrics = engine.engine.metrics()
    assert together == alone
    assert metrics.preemptions > 0


def test_a_wait_for_a_mask_holds_nobody_up_and_can_be_cancelled(store: Any) -> None:
    with Guided(store) as engine:
        waits = engine.submit(prompt(9), 20, guided=True)
        engine.engine.allow(waits, 0, mask([4]))
        while not engine.outputs.get(waits):
            engine.generate(prompt(4), 3)
        assert len(engine.generate(prompt(12), 30)) == 30
        assert [o.token_ids for o in engine.outputs[waits]] == [[4]]
        assert engine.engine.metrics().running == 1
        engine.engine.cancel(waits)
        assert engine.finish(waits) == "cancelled"
        engine.engine.allow(waits, 1, mask([4]))  # too late: nobody is there
        never = engine.submit(prompt(9), 20, guided=True)
        assert len(engine.generate(prompt(12), 5)) == 5
        engine.engine.cancel(never)
        assert engine.finish(never) == "cancelled"


def test_sleep_and_wake_between_mask_and_token(store: Any) -> None:
    with Guided(store) as engine:
        expected = engine.tokens(engine.guide(prompt(30), 12, few))
        request = engine.submit(prompt(30), 12, guided=True)
        engine.engine.allow(request, 0, mask(few([])))
        while not engine.outputs.get(request):
            engine.generate(prompt(4), 3)
        engine.engine.sleep(1)
        with engine.lock:
            engine.rules[request] = few
            engine.engine.allow(request, 1, mask(few(expected[:1])))
        engine.engine.wake()
        assert engine.tokens(request) == expected


def test_what_cannot_be_is_refused(store: Any) -> None:
    with Guided(store) as engine:
        with pytest.raises(ValueError, match=r"9 words of 32 bits, expected 10"):
            engine.engine.allow(1, 0, bytes(36))
        with pytest.raises(ValueError, match="allowed_token_ids"):
            engine.submit([1], 4, guided=True, allowed_token_ids=[3])
        with pytest.raises(ValueError, match="must generate"):
            engine.submit([1], 0, guided=True)
        early = engine.submit(prompt(5), 4, guided=True)
        engine.engine.allow(early, 1, mask([3]))
        assert engine.wait(early)[-1].error == "a token mask that the request does not wait for"
        free = engine.submit(prompt(5), 300)
        engine.engine.allow(free, 0, mask([3]))
        assert engine.finish(free) == "error"


def test_a_guided_sequence_is_planned_when_its_mask_is_there() -> None:
    h = harness()
    free, guided = submit(h, 20, 10, 1), submit(h, 20, 10, 2, guided=True)
    assert step(h) == [free] and step(h) == [free]
    h.allow(guided, 0, [9])
    assert step(h) == [free, guided] and step(h) == [free]
    h.allow(guided, 1, [9])
    # Two steps in flight: the second holds the sequence whose last token is not known, the guided one waits.
    first, second = h.plan(), h.plan()
    assert [s["sequence"] for s in first[0]] == [free, guided]
    assert [s["sequence"] for s in second[0]] == [free]
    h.complete([9, 9])
    h.complete([9])
    h.allow(guided, 2, [])
    assert [o.finish_reason for o in h.outputs() if o.id == guided][-1] == "stop"


def test_one_that_waits_for_its_mask_lets_others_in() -> None:
    """Also when nothing else runs: it has not failed to fit."""
    h = harness(max_batch_size=1)
    guided = submit(h, 20, 10, 1, guided=True)
    assert step(h) == []
    free = submit(h, 20, 1, 2)
    assert step(h) == [free] and step(h) == []
    h.allow(guided, 0, [9])
    assert step(h) == [guided]
    assert not [o.error for o in h.outputs() if o.error]


def test_the_prompt_of_one_that_was_preempted_is_computed_when_its_mask_is_there() -> None:
    h = harness(cache_block_count=5, max_batch_size=2)
    free = submit(h, 30, 40, 1)
    guided = submit(h, 30, 10, 2, guided=True, priority=1)
    h.allow(guided, 0, [9])
    assert step(h) == [free, guided]
    while h.metrics().preemptions == 0:
        assert step(h) == [free]
    assert h.metrics().waiting == 1
    while h.metrics().running:
        assert step(h) == [free]
    assert step(h) == []
    h.allow(guided, 1, [9])
    assert step(h) == [guided]
