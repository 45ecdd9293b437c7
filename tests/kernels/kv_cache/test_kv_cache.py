from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbomill._core import kernels


def reference(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """formats.md: scale = (max - min) / (2^b - 1), zero = min, both fp16; one token and head to a row."""
    low, high = x.min(1), x.max(1)
    scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16)
    zero = low.astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = (x - zero[:, None].astype(np.float32)) * (np.float32(1) / scale[:, None].astype(np.float32))
    level = np.where(scale[:, None] > 0, level, 0)
    codes = np.clip(np.floor(level + np.float32(0.5)), 0, 2**bits - 1).astype(np.uint8)
    return codes, np.stack([scale, zero], 1)


@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_and_parameters_are_exact(bits: int, d: int, isa: str) -> None:
    x = np.random.default_rng(d).standard_normal((50, d)).astype(np.float32)
    codes, params = reference(x, bits)
    got_codes, got_params, values = kernels.kv_roundtrip(x, bits, isa)
    np.testing.assert_array_equal(got_params.view(np.float16), params)
    if bits == 4:
        got_codes = np.stack([got_codes & 15, got_codes >> 4], -1).reshape(50, d)
    np.testing.assert_array_equal(got_codes, codes)
    scale, zero = params[:, :1].astype(np.float32), params[:, 1:].astype(np.float32)
    np.testing.assert_allclose(values, codes * scale + zero, rtol=1e-6, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-6e4, 6e4, width=16), min_size=8, max_size=8), st.sampled_from([4, 8]))
def test_error_is_within_a_step(values: list[float], bits: int) -> None:
    x = np.array([values], np.float32)
    _, params, read = kernels.kv_roundtrip(x, bits)
    scale, zero = (float(v) for v in params.view(np.float16)[0])
    # Half a step, and what rounding scale and zero to fp16 moves the grid's ends by.
    slack = abs(zero) * 2**-10 + scale * (2**bits - 1) * 2**-10 + 1e-6
    assert np.abs(read - x).max() <= scale / 2 + slack


def test_constant_rows_are_kept(isa: str) -> None:
    x = np.full((1, 64), 1.5, np.float32)
    assert (kernels.kv_roundtrip(x, 4, isa)[2] == 1.5).all()


@pytest.mark.parametrize(("policy", "dtype"), [(16, torch.float8_e4m3fn), (17, torch.float8_e5m2)])
@pytest.mark.parametrize("d", [24, 64, 80])
def test_fp8_rows_reach_448(policy: int, dtype: torch.dtype, d: int, isa: str) -> None:
    """torch's rounding, of rows scaled so that their greatest magnitude becomes e4m3's largest number."""
    x = np.random.default_rng(d).standard_normal((60, d)).astype(np.float32)
    x *= np.exp2(np.arange(60) - 40)[:, None].astype(np.float32)
    x[0] = 0
    codes, params, values = kernels.kv_roundtrip(x, policy, isa)
    scale = (np.abs(x).max(1) / np.float32(448)).astype(np.float16)
    np.testing.assert_array_equal(params.view(np.float16), np.stack([scale, np.zeros_like(scale)], 1))
    wide = scale.astype(np.float32)[:, None]
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    numbers = torch.from_numpy(np.clip(x * inverse, -448, 448)).to(dtype)
    np.testing.assert_array_equal(codes, numbers.view(torch.uint8).numpy())
    np.testing.assert_array_equal(values, numbers.float().numpy() * wide)


@pytest.mark.parametrize(
    ("d", "block"), [(64, 64), (128, 128), (80, 16), (96, 32), (192, 64), (24, 8), (6, 2)]
)
def test_rotation_is_a_hadamard_matrix_in_blocks(d: int, block: int, isa: str) -> None:
    """Sylvester's construction, over the largest power of two that divides D; its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = np.kron(np.eye(d // block), matrix) / np.sqrt(block)
    x = np.random.default_rng(d).standard_normal((5, d)).astype(np.float32)
    y = kernels.hadamard(x, isa)
    np.testing.assert_allclose(y, x @ matrix, atol=2e-6)
    np.testing.assert_allclose(kernels.hadamard(y, isa), x, atol=2e-6)
