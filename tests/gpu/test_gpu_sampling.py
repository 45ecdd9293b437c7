"""The GPU's sampler against the host's: the same token for the same logits, seed and position."""

from __future__ import annotations

import numpy as np
import pytest

from turbomill import _core

PARAMETERS = [
    (0.0, 0, 1.0),
    (5.0, 1, 1.0),
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (0.01, 0, 1.0),
    (1.0, 5, 1.0),
    (0.8, 50, 1.0),
    (1.3, 0, 0.8),
    (1.0, 0, 0.999),
    (1.0, 0, 0.01),
    (1.0, 40, 0.6),
    (0.2, 3, 0.9),
    (2.0, 1000, 0.95),
    (1.0, 10**6, 0.5),
]
MIN_P = [0.0, 0.001, 0.1, 1.0]


def host(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, position: int, min_p: float
) -> list[int]:
    return [
        _core.kernels.sample(row, temperature, top_k, top_p, seed, position + i, min_p)
        for i, row in enumerate(logits)
    ]


@pytest.mark.parametrize("vocab", [1, 2, 31, 333, 1023, 1024, 1025, 49152, 128256])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), PARAMETERS)
def test_same_tokens_as_the_host(vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng()
    rows = 24 if vocab < 40000 else 6
    seed, position = int(rng.integers(2**63)), int(rng.integers(10**6))
    for spread in (0.1, 3.0, 15.0):
        logits = rng.standard_normal((rows, vocab)).astype(np.float32) * np.float32(spread)
        for min_p in MIN_P:
            got = _core.kernels_cuda.sample(logits, temperature, top_k, top_p, seed, position, min_p)
            assert got == host(logits, temperature, top_k, top_p, seed, position, min_p)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), PARAMETERS)
def test_ties_are_broken_by_id(temperature: float, top_k: int, top_p: float) -> None:
    """Few distinct logits, both zeros among them: sets end within runs of equal ones."""
    rng = np.random.default_rng()
    for _ in range(5):
        logits = rng.integers(-2, 3, (16, 700)).astype(np.float32)
        logits[logits == 0] = rng.choice([0.0, -0.0], int((logits == 0).sum()))
        seed = int(rng.integers(2**63))
        for min_p in MIN_P:
            got = _core.kernels_cuda.sample(logits, temperature, top_k, top_p, seed, 0, min_p)
            assert got == host(logits, temperature, top_k, top_p, seed, 0, min_p)


def test_greedy_takes_the_first_maximum() -> None:
    logits = np.zeros((3, 5000), np.float32)
    logits[0, [77, 4000]] = 2.0
    logits[1, [1023, 1024]] = 2.0
    assert _core.kernels_cuda.sample(logits, 0.0, 0, 1.0, 0, 0) == [77, 1023, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(bad: float) -> None:
    logits = np.random.default_rng().standard_normal((4, 3000)).astype(np.float32)
    logits[2, 2999] = bad
    for temperature in (0.0, 1.0):
        got = _core.kernels_cuda.sample(logits, temperature, 0, 1.0, 3, 0)
        assert got[2] == -1
        for row in (0, 1, 3):
            assert got[row] == _core.kernels.sample(logits[row], temperature, 0, 1.0, 3, row)
