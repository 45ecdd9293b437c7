"""How far a result may lie from its fp64 reference: the data format owns the tolerance, not the test."""

from __future__ import annotations

import numpy as np

RELATIVE = {
    "float32": 2e-6,
    "float16": 2e-6,
    "bfloat16": 2e-6,
    "w4": 2e-6,
}  # weights are exact, sums are fp32


def assert_close(actual: np.ndarray, expected: np.ndarray, kind: str) -> None:
    """||actual - expected|| / ||expected|| within the format's bound; NaN and inf masks equal first."""
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    norm = np.linalg.norm(expected)
    error = np.linalg.norm(actual.astype(np.float64) - expected)
    assert error <= RELATIVE[kind] * norm * max(1.0, np.log2(expected.size + 1) / 4), error / norm
