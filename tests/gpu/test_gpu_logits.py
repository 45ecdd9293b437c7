"""Edits of logits, and logprobs, on the GPU: the host's, bit for bit but for the sums of the logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from logit_rules import random_rules
from native_engine import Native
from test_native_parity import prompt
from test_native_sampling import RULES

from turbomill import _core


@pytest.mark.parametrize("vocab", [2, 31, 33, 1025, 49152])
def test_edits_are_the_hosts(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(10):
        logits = rng.standard_normal((9, vocab)).astype(np.float32) * 4
        logits[3, vocab // 2] = np.nan
        rules = {row: random_rules(rng, vocab) for row in (0, 1, 3, 8)}
        expected = logits.copy()
        last = [0] * 9
        rows = []
        for row, r in rules.items():
            expected[row] = _core.kernels.edit_logits(logits[row], **r)
            last[row] = r["last"]
            fields = ("repetition", "presence", "frequency", "edits", "bans", "allowed", "last_unknown")
            rows.append((row, *[r[f] for f in fields]))
        got = _core.kernels_cuda.edit_logits(logits, rows, last)
        np.testing.assert_array_equal(got, expected)


def test_many_edits_of_many_rows() -> None:
    """More than the staging memory first holds."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 5000)).astype(np.float32)
    edits = [(t, t % 3, 0.5, True, False) for t in range(4000)]
    got = _core.kernels_cuda.edit_logits(
        logits, [(r, 1.1, 0.2, 0.3, edits, [], [], True) for r in range(64)], list(range(64))
    )
    for r in (0, 31, 63):
        expected = _core.kernels.edit_logits(
            logits[r], 1.1, 0.2, 0.3, edits, [], [], last=r, last_unknown=True
        )
        np.testing.assert_array_equal(got[r], expected)


@pytest.mark.parametrize("count", [0, 1, 7, 20])
@pytest.mark.parametrize("vocab", [1, 3, 1025, 49152])
def test_logprobs_are_the_hosts(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab + count)
    for spread in (0.0, 3.0, 30.0):
        logits = (rng.standard_normal((5, vocab)) * spread).astype(np.float32)
        tokens = rng.integers(0, vocab, 5).tolist()
        for row, (logprob, top) in enumerate(_core.kernels_cuda.logprobs(logits, tokens, count)):
            expected, expected_top = _core.kernels.logprobs(logits[row], tokens[row], count)
            assert logprob == pytest.approx(expected, abs=1e-5)
            assert [t for t, _ in top] == [t for t, _ in expected_top]
            np.testing.assert_allclose([p for _, p in top], [p for _, p in expected_top], atol=1e-5)


def test_texts_under_rules_are_the_cpu_backends(store: Any) -> None:
    """Together with requests without rules, whose steps are recorded when they are among themselves."""
    pytest.importorskip("scipy_openblas64", reason="the CPU backend needs it")
    texts = []
    for device in ("cpu", "cuda"):
        with Native(store, device=device) as engine:
            requests = [engine.submit(prompt(20, seed=i), 40, seed=i, **r) for i, r in enumerate(RULES)]
            texts.append([engine.tokens(r) for r in requests])
            texts[-1].append(engine.generate(prompt(20), 30))
    assert texts[0] == texts[1]


def test_logprobs_of_samples_and_prompts(store: Any) -> None:
    pytest.importorskip("scipy_openblas64", reason="the CPU backend needs it")
    ids = prompt(300)
    reported = []
    for device in ("cpu", "cuda"):
        with Native(store, device=device, max_prefill_token_num=200, max_batch_size=8) as engine:
            request = engine.submit(ids, 10, temperature=1.0, seed=3, logprobs=4, prompt_logprobs=2)
            outputs = engine.wait(request)
            assert len([t for o in outputs for t in o.token_ids]) == 10
            reported.append(
                [[x for o in outputs for x in o.prompt_logprobs], [x for o in outputs for x in o.logprobs]]
            )
    assert [len(part) for part in reported[0]] == [299, 10] == [len(part) for part in reported[1]]
    for cpu, gpu in zip(reported[0][0] + reported[0][1], reported[1][0] + reported[1][1], strict=True):
        assert gpu.logprob == pytest.approx(cpu.logprob, abs=2e-3)
        np.testing.assert_allclose([p for _, p in gpu.top], [p for _, p in cpu.top], atol=2e-3)
