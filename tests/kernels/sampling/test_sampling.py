from __future__ import annotations

import numpy as np
import pytest

from turbomill._core import kernels


def distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Temperature, min-p, top-k, then the smallest set whose probability reaches top-p, renormalised."""
    order = np.argsort(-logits, kind="stable")
    order = order[np.exp((logits[order] - logits.max()) / temperature) >= min_p]
    if top_k:
        order = order[:top_k]
    p = np.exp((logits[order] - logits.max()) / temperature)
    p /= p.sum()
    keep = int(np.searchsorted(np.cumsum(p), top_p)) + 1 if top_p < 1 else len(p)
    out = np.zeros_like(logits)
    out[order[:keep]] = p[:keep] / p[:keep].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 40, 0.6, 0.0),
        (0.2, 3, 0.9, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, 0, 1.0, 0.05),
        (1.2, 6, 0.8, 0.1),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_frequencies_follow_the_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 2
    expected = distribution(logits.astype(np.float64), temperature, top_k, top_p, min_p)
    draws = 20000
    counts = np.bincount(
        [kernels.sample(logits, temperature, top_k, top_p, 1234, i, min_p) for i in range(draws)],
        minlength=50,
    )
    assert (counts[expected == 0] == 0).all()
    used = expected > 0
    chi2 = (((counts - draws * expected) ** 2)[used] / (draws * expected[used])).sum()
    freedom = used.sum() - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * max(freedom, 1)) + 5  # about five standard deviations


def test_greedy_takes_the_first_maximum() -> None:
    logits = np.array([0.0, 3.0, 3.0, -1.0], np.float32)
    assert kernels.sample(logits, 0.0, 0, 1.0, 7, 0) == 1
    assert kernels.sample(logits, 5.0, 1, 1.0, 7, 0) == 1


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = np.zeros(1000, np.float32)
    first = [kernels.sample(logits, 1.0, 0, 1.0, 5, i) for i in range(20)]
    assert first == [kernels.sample(logits, 1.0, 0, 1.0, 5, i) for i in range(20)]
    assert first != [kernels.sample(logits, 1.0, 0, 1.0, 6, i) for i in range(20)]
    assert len(set(first)) > 15


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        kernels.sample(np.array([0.0, bad], np.float32), 0.0, 0, 1.0, 0, 0)
