from __future__ import annotations

import numpy as np
import pytest
import tolerance

from turbomill._core import kernels


@pytest.mark.parametrize("h", [8, 15, 16, 17, 64, 576])
def test_rms_norm(h: int, isa: str) -> None:
    rng = np.random.default_rng(h)
    x, w = rng.standard_normal((3, h)).astype(np.float32) * 30, rng.standard_normal(h).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
    tolerance.assert_close(kernels.rms_norm(x, w, 1e-5, isa), expected, "float32")


@pytest.mark.parametrize("d", [8, 64, 80, 96, 128])
def test_rope_rotates_halves(d: int, isa: str) -> None:
    rng = np.random.default_rng(d)
    x = rng.standard_normal((4, d)).astype(np.float32)
    angle = rng.uniform(-100, 100, (4, d // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = x[:, : d // 2].astype(np.float64), x[:, d // 2 :].astype(np.float64)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
    tolerance.assert_close(kernels.rope(x, cos, sin, isa), expected, "float32")


@pytest.mark.parametrize("inter", [8, 24, 1536])
def test_silu_gate_reads_blocks_of_eight(inter: int, isa: str) -> None:
    rng = np.random.default_rng(inter)
    gate, up = (rng.standard_normal((2, inter)).astype(np.float32) * 8 for _ in range(2))
    mixed = np.stack([gate.reshape(2, -1, 8), up.reshape(2, -1, 8)], axis=2).reshape(2, -1)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    tolerance.assert_close(kernels.silu_gate(mixed, isa), expected, "float32")


def test_silu_at_the_ends_of_the_range(isa: str) -> None:
    """exp must not overflow into NaN: silu(-1e4) is 0 and silu(1e4) is 1e4."""
    gate = np.array([-1e4, -100, -88.5, -50, 50, 88.5, 100, 1e4], np.float32)
    out = kernels.silu_gate(np.concatenate([gate, np.ones(8, np.float32)])[None], isa)[0]
    np.testing.assert_allclose(out, np.where(gate < 0, 0, gate), atol=1e-20)


@pytest.mark.parametrize("inter", [8, 24, 1536])
def test_gelu_gate_is_the_tanh_form(inter: int, isa: str) -> None:
    rng = np.random.default_rng(inter)
    gate, up = (rng.standard_normal((2, inter)).astype(np.float32) * 8 for _ in range(2))
    gate[0, :8] = [-1e4, -100, -5, -1e-3, 1e-3, 5, 100, 1e4]
    mixed = np.stack([gate.reshape(2, -1, 8), up.reshape(2, -1, 8)], axis=2).reshape(2, -1)
    wide = gate.astype(np.float64)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))
    tolerance.assert_close(kernels.gelu_gate(mixed, isa), 0.5 * wide * (1 + tanh) * up, "float32")


@pytest.mark.parametrize("n", [1, 15, 16, 17, 320])
def test_softcap(n: int, isa: str) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32) * 100
    x[0] = 1e6
    expected = 30 * np.tanh(x.astype(np.float64) * 0.25 / 30)
    tolerance.assert_close(kernels.softcap(x, 0.25, 30.0, isa), expected, "float32")
