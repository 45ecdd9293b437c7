from __future__ import annotations

import gpu_tolerance
import numpy as np
import pytest

from turbomill import _core

DTYPES = ["float32", "float16", "bfloat16"]


def fresh() -> np.random.Generator:
    return np.random.default_rng()


def normed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [8, 15, 16, 17, 63, 64, 65, 576, 4096])
def test_rms_norm(h: int, dtype: str) -> None:
    x, w = (
        fresh().standard_normal((3, h)).astype(np.float32) * 30,
        fresh().standard_normal(h).astype(np.float32),
    )
    y = _core.kernels_cuda.rms_norm(x, None, w, 1e-5, dtype)
    gpu_tolerance.assert_close(y, normed(x, w), gpu_tolerance.OUTPUT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [16, 65, 4096])
def test_add_rms_norm_keeps_the_residual_in_fp32(h: int, dtype: str) -> None:
    x, w = (
        fresh().standard_normal((5, h)).astype(np.float32) * 30,
        fresh().standard_normal(h).astype(np.float32),
    )
    delta = gpu_tolerance.rounded(fresh().standard_normal((5, h)), dtype)
    y, residual = _core.kernels_cuda.rms_norm(x, delta, w, 1e-5, dtype)
    np.testing.assert_array_equal(residual, x + delta)
    gpu_tolerance.assert_close(y, normed(x + delta, w), gpu_tolerance.OUTPUT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [16, 65, 4096])
def test_rms_norm_of_activations_in_place(h: int, dtype: str) -> None:
    x, w = (
        gpu_tolerance.rounded(fresh().standard_normal((5, h)) * 30, dtype),
        fresh().standard_normal(h).astype(np.float32),
    )
    y = _core.kernels_cuda.narrow_rms_norm(x, w, 1e-5, dtype)
    gpu_tolerance.assert_close(y, normed(x, w), gpu_tolerance.OUTPUT[dtype])


def test_softcap() -> None:
    x = np.concatenate([fresh().standard_normal(1000) * 40, [0, 1e30, -1e30]]).astype(np.float32)
    np.testing.assert_allclose(
        _core.kernels_cuda.softcap(x, 30.0), 30 * np.tanh(x / 30), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inter", [8, 24, 64, 1536])
def test_gates_read_blocks_of_eight(inter: int, dtype: str) -> None:
    gate, up = (gpu_tolerance.rounded(fresh().standard_normal((3, inter)) * 8, dtype) for _ in range(2))
    mixed = np.stack([gate.reshape(3, -1, 8), up.reshape(3, -1, 8)], axis=2).reshape(3, -1)
    wide = gate.astype(np.float64)
    y = _core.kernels_cuda.gate(mixed, "silu", dtype)
    gpu_tolerance.assert_close(y, wide / (1 + np.exp(-wide)) * up, gpu_tolerance.OUTPUT[dtype])
    y = _core.kernels_cuda.gate(mixed, "gelu_tanh", dtype)
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    gpu_tolerance.assert_close(y, gelu * up, gpu_tolerance.OUTPUT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_at_the_ends_of_the_range(activation: str, dtype: str) -> None:
    """exp must not overflow into NaN: silu(-1e4) is 0 and silu(1e4) is 1e4."""
    gate = gpu_tolerance.rounded(np.array([-1e4, -100, -88.5, -50, 50, 88.5, 100, 1e4]), dtype)
    out = _core.kernels_cuda.gate(np.concatenate([gate, np.ones(8, np.float32)])[None], activation, dtype)[0]
    np.testing.assert_allclose(out, np.where(gate < 0, 0, gate), atol=1e-20)


@pytest.mark.parametrize("d", [24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_cache_codes_and_parameters_are_exact(bits: int, d: int) -> None:
    """formats.md's rule, to the bit, as on the CPU."""
    x = fresh().standard_normal((48, d)).astype(np.float32)
    x[3] = 1.5  # a constant row
    low, high = x.min(1), x.max(1)
    scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16)
    zero = low.astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = (x - zero[:, None].astype(np.float32)) * (np.float32(1) / scale[:, None].astype(np.float32))
    level = np.where(scale[:, None] > 0, level, 0)
    codes = np.clip(np.floor(level + np.float32(0.5)), 0, 2**bits - 1).astype(np.uint8)
    got, params = _core.kernels_cuda.kv_write(x, bits)
    if bits == 4:
        got = np.stack([got & 15, got >> 4], -1).reshape(48, d)
    np.testing.assert_array_equal(params.view(np.float16), np.stack([scale, zero], 1))
    np.testing.assert_array_equal(got, codes)
