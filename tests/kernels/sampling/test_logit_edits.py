"""Penalties, biases, bans and logprobs of one row, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from logit_rules import random_rules

from turbomill._core import kernels

BANNED, DISALLOWED = np.float32(-1e30), np.float32(-3e38)


def reference(logits, repetition, presence, frequency, edits, bans, allowed, last, last_unknown):
    """The rules of kernels/logit_edits.h, token by token."""
    out = logits.copy()
    table = {token: [count, bias, seen, banned] for token, count, bias, seen, banned in edits}
    if last_unknown:
        row = table.setdefault(last, [0, 0.0, True, False])
        row[0] += 1
        row[2] = True
    for token, (count, bias, seen, banned) in table.items():
        x = out[token]
        if seen:
            x = x / np.float32(repetition) if x > 0 else x * np.float32(repetition)
        if count:
            x = x - np.float32(presence) - np.float32(frequency) * np.float32(count)
        out[token] = BANNED if banned else x + np.float32(bias)
    for when, token in bans:
        if when == last:
            out[token] = BANNED
    if allowed:
        out[np.setdiff1d(np.arange(len(out)), allowed)] = DISALLOWED
    return out


@pytest.mark.parametrize("vocab", [2, 31, 32, 33, 1000])
def test_edits_equal_the_reference(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(60):
        logits = rng.standard_normal(vocab).astype(np.float32) * 4
        rules = random_rules(rng, vocab)
        np.testing.assert_array_equal(kernels.edit_logits(logits, **rules), reference(logits, **rules))


def test_a_broken_row_stays_broken() -> None:
    """A mask must not hide that the model's logits are not finite."""
    logits = np.array([1.0, np.nan, np.inf, 2.0], np.float32)
    out = kernels.edit_logits(logits, edits=[(1, 0, 5.0, False, True)], allowed=[3], last=0)
    np.testing.assert_array_equal(out, np.array([DISALLOWED, np.nan, np.inf, 2.0], np.float32))


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [1, 3, 500])
def test_logprobs(vocab: int, count: int) -> None:
    rng = np.random.default_rng(count)
    for spread in (0.0, 3.0, 30.0):  # 0: all tie, and the lowest ids come first
        logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
        exact = logits.astype(np.float64)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        token = int(rng.integers(vocab))
        logprob, top = kernels.logprobs(logits, token, count)
        assert logprob == pytest.approx(exact[token], abs=1e-5)
        expected = np.argsort(-logits, kind="stable")[:count].tolist()
        assert [t for t, _ in top] == expected
        np.testing.assert_allclose([p for _, p in top], exact[expected], atol=1e-5)
