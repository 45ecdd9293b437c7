"""How far a GPU result may lie from its fp64 reference: the activation format owns the tolerance.

Inputs are rounded to the format before both sides see them, so what remains is the rounding of the output (at
worst 2^-12 of a value for float16, 2^-9 for bfloat16, less in the mean) and of fp32 sums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

OUTPUT = {"float32": 3e-6, "float16": 4e-4, "bfloat16": 3e-3}
# Attention also rounds probabilities to the format before they meet the values.
ATTENTION = {"float32": 3e-6, "float16": 8e-4, "bfloat16": 6e-3}
# A quantized cache's keys and values are rounded to the format, too, when they are read.
ATTENTION_QUANTIZED = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}
# ||row - reference|| / ||reference|| of the logits of a tiny random model, in the mean over rows.
LOGITS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rounded(a: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values that `dtype` holds, as fp32."""
    return torch.from_numpy(np.ascontiguousarray(a, np.float32)).to(TORCH[dtype]).float().numpy()


def bits(a: np.ndarray, dtype: str) -> np.ndarray:
    """The 16 bits of values that `dtype` holds exactly."""
    tensor = torch.from_numpy(np.ascontiguousarray(a, np.float32)).to(TORCH[dtype])
    assert torch.equal(tensor.float(), torch.from_numpy(np.ascontiguousarray(a, np.float32)))
    return tensor.view(torch.int16).numpy().view(np.uint16)


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """||actual - expected|| / ||expected|| within `bound`, no row far worse; NaN and inf agree."""
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    difference = actual.astype(np.float64) - expected
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(difference) <= bound * norm, np.linalg.norm(difference) / norm
    rows = np.linalg.norm(difference, axis=-1)
    assert rows.max() <= 8 * bound * max(norm / np.sqrt(len(rows)), np.finfo(np.float32).tiny), rows.argmax()


def assert_overlap_changes_nothing(chain: Callable[[bool], np.ndarray]) -> None:
    """Programmatic dependent launch (`chain(True)`) changes when weights are read, and nothing else."""
    apart, *over = (chain(overlap) for overlap in (False, True, True, True))
    assert np.isfinite(apart).all()
    assert np.abs(apart).max() > 0
    for run in over:  # a race would not lose every time
        np.testing.assert_array_equal(run, apart)


def assert_logits(actual: np.ndarray, expected: np.ndarray, bound: float, flips: bool = False) -> None:
    """Rows [T, V] of logits: near the reference's in the mean. `flips`: a token's experts may be others for a
    last bit, which moves its row as a whole and by its keys a little of all later ones; then three rows of
    four, ten times as far."""
    assert np.isfinite(actual).all()
    assert actual.shape == expected.shape
    rows = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1).mean()
    error = np.quantile(rows, 0.75) / 10 if flips else np.sqrt((rows**2).mean())
    print(f"error of logits {error:.2e}, bound {bound:.2e}")
    assert error <= bound, error
