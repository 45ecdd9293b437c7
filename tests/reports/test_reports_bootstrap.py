"""Intervals and paired differences: coverage on data whose mean is known, and by hand."""

import numpy as np
import pytest

from turbomill.reports.bootstrap import Counted, interval, paired, resampled_means


def counted(means, counts=None):
    means = np.asarray(means, dtype=np.float64)
    return Counted(means, np.ones(len(means), np.int64) if counts is None else np.asarray(counts))


def test_the_mean_weighs_windows_by_their_values():
    found = Counted.of([np.array([1.0, 3.0]), np.array([8.0])])
    assert found.mean == 4 and found.counts.tolist() == [2, 1]


def test_spread_is_the_standard_error():
    values = np.random.default_rng(0).normal(5, 2, 20)
    draws = resampled_means(counted(values))
    assert draws.mean() == pytest.approx(values.mean(), abs=0.02)
    assert draws.std() == pytest.approx(values.std(ddof=1) / np.sqrt(20), rel=0.03)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        low, high = interval(counted(rng.normal(0, 1, 12)))
        hits += low < 0 < high
    assert 0.88 <= hits / 200 <= 0.99


def test_one_window_has_no_interval():
    assert interval(counted([3.0])) is None


def test_pairs_cancel_what_windows_share():
    """Windows differ by far more than the models do, and the difference is still certain."""
    rng = np.random.default_rng(2)
    shared = rng.normal(3, 1, 24)
    a, b = shared + rng.normal(0, 0.01, 24), shared + 0.02 + rng.normal(0, 0.01, 24)
    found = paired(counted(a), counted(b))
    assert found.mean == pytest.approx(0.02, abs=0.01) and found.low > 0 and found.p_value < 0.001
    wide = interval(counted(b))
    assert wide[1] - wide[0] > 20 * (found.high - found.low)


def test_noise_is_no_difference():
    """Under no difference, p-values below 0.05 come about one time in twenty."""
    rng = np.random.default_rng(3)
    values = [
        paired(counted(rng.normal(0, 1, 24)), counted(rng.normal(0, 1, 24))).p_value for _ in range(100)
    ]
    assert np.mean(np.array(values) < 0.05) < 0.12 and np.mean(values) > 0.35


def test_the_same_is_no_difference():
    found = paired(counted([1.0, 2.0, 3.0]), counted([1.0, 2.0, 3.0]))
    assert (found.mean, found.low, found.high, found.p_value) == (0, 0, 0, 1)
