"""Confidence intervals over windows of text, and paired differences: the percentile bootstrap.

The unit is a window, not a token: neighbouring tokens' losses depend on each other. An interval says how much
the figure would move with other windows of text of the same kind; texts of another kind it knows nothing of.
Percentile intervals of n windows are too narrow by sqrt((n - 1) / n), which is put right (Hesterberg 2015,
"What teachers should know about the bootstrap").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Counted:
    """Means over windows, and how many values each is the mean of."""

    means: NDArray[np.float64]  # [n]
    counts: NDArray[np.int64]  # [n]

    @classmethod
    def of(cls, values: Sequence[NDArray[np.float64]]) -> Counted:
        """Of every window's values."""
        return cls(np.array([v.mean() for v in values]), np.array([len(v) for v in values]))

    @property
    def mean(self) -> float:
        """Over all values of all windows."""
        return float(self.means @ self.counts / self.counts.sum())


def resampled_means(counted: Counted, seed: int = 0) -> NDArray[np.float64]:
    """The mean over each of RESAMPLES draws of n windows with replacement: [RESAMPLES], spread put right."""
    n = len(counted.means)
    rng = np.random.default_rng(seed)
    # How often each window was drawn: [RESAMPLES, n]
    draws = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    means = (draws @ (counted.means * counted.counts)) / (draws @ counted.counts)
    return counted.mean + (means - counted.mean) * np.sqrt(n / (n - 1))


def interval(counted: Counted) -> tuple[float, float] | None:
    """The 95 % interval of the mean; None for a single window, which says nothing of its spread."""
    if len(counted.means) < 2:
        return None
    low, high = np.percentile(resampled_means(counted), [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """A paired difference, B - A, over the same windows."""

    mean: float
    low: float
    high: float
    p_value: float  # two-sided: how often chance alone would give a difference as large


def paired(a: Counted, b: Counted) -> Difference:
    """The difference of two means over the same windows, at least two of them.

    Windows are drawn together, so what makes one hard for both models cancels.
    """
    both = Counted(b.means - a.means, a.counts)
    draws = resampled_means(both)
    low, high = np.percentile(draws, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    # Never 0: RESAMPLES draws cannot tell less than 1 / RESAMPLES.
    tail = (1 + min(int((draws <= 0).sum()), int((draws >= 0).sum()))) / (RESAMPLES + 1)
    p_value = 1.0 if not both.means.any() else min(1.0, 2 * tail)
    return Difference(both.mean, float(low), float(high), p_value)
