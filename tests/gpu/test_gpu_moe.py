"""A mixture of experts, part by part: routing and sorting exactly, products of experts against fp64."""

from __future__ import annotations

from typing import Any

import gpu_tolerance
import numpy as np
import pytest
from test_gpu_linear import fused, w4_case  # noqa: F401

from turbomill import _core

TYPES = ["float32", "float16", "bfloat16"]
# Rows of each expert: none, one, tiles and their borders, all for one.
COUNTS = {
    "few": [1, 0, 0, 1, 2, 0, 1, 0],
    "borders": [7, 8, 9, 15, 16, 17, 0, 33],
    "many": [0, 127, 128, 129, 64, 1, 300, 63],
    "one": [0, 0, 0, 0, 0, 500, 0, 0],
    "first": [70, 0, 0, 0, 0, 0, 0, 0],
}
SIZES = [(48, 64), (64, 72), (136, 192), (200, 320)]


def offsets_of(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int32)


def expected_of(x: np.ndarray, offsets: np.ndarray, weights: Any) -> np.ndarray:
    """Each expert's rows of x times its weight [N, K], in fp64."""
    parts = [
        x[begin:end].astype(np.float64) @ w.astype(np.float64).T
        for begin, end, w in zip(offsets, offsets[1:], weights, strict=False)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top"),
    [(1, 4, 2), (7, 8, 8), (33, 60, 4), (600, 128, 8), (5, 300, 1), (1000, 3, 2)],
)
def test_routing(tokens: int, experts: int, top: int, normalise: bool) -> None:
    rng = np.random.default_rng()
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    logits[0] = np.round(logits[0])  # equals: the lower expert first
    chosen, weights, offsets, pairs, places = _core.kernels_cuda.moe_route(logits, top, normalise)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    np.testing.assert_array_equal(np.reshape(chosen, (tokens, top)), order)
    wide = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    wide /= wide.sum(1, keepdims=True)
    expected = np.take_along_axis(wide, order, 1)
    if normalise:
        expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(np.reshape(weights, (tokens, top)), expected, rtol=1e-5)
    np.testing.assert_array_equal(offsets, offsets_of(np.bincount(chosen, minlength=experts).tolist()))
    np.testing.assert_array_equal(pairs, np.argsort(chosen, kind="stable"))
    np.testing.assert_array_equal(np.asarray(pairs)[places], np.arange(tokens * top))


def test_routing_of_what_is_not_finite_stays_inside() -> None:
    """A token whose logits are NaN has some experts, and the others their own."""
    logits = np.random.default_rng().standard_normal((9, 16)).astype(np.float32)
    logits[[2, 5, 7]] = np.array([np.nan, np.inf, -np.inf])[:, None]
    chosen, _, offsets, pairs, _ = _core.kernels_cuda.moe_route(logits, 4, True)
    rows = np.reshape(chosen, (9, 4))
    assert ((rows >= 0) & (rows < 16)).all()
    assert all(len(set(row)) == 4 for row in rows.tolist())
    assert offsets[-1] == 36
    assert sorted(pairs) == list(range(36))
    kept = [0, 1, 3, 4, 6, 8]
    np.testing.assert_array_equal(rows[kept], np.argsort(-logits[kept], axis=1)[:, :4])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), [*SIZES, (33, 30), (300, 1024)])
@pytest.mark.parametrize("name", COUNTS)
def test_dense_experts(name: str, n: int, k: int, dtype: str) -> None:
    rng = np.random.default_rng()
    offsets = offsets_of(COUNTS[name])
    w = gpu_tolerance.rounded(rng.standard_normal((8, n, k)), dtype)
    x = gpu_tolerance.rounded(rng.standard_normal((offsets[-1], k)), dtype)
    y = _core.kernels_cuda.grouped_dense(x, offsets, w, dtype)
    gpu_tolerance.assert_close(y, expected_of(x, offsets, w), gpu_tolerance.OUTPUT[dtype])


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (144, 72), (208, 320), (272, 1024)])
@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("name", COUNTS)
def test_dense_experts_fused(name: str, scale: int, n: int, k: int, dtype: str) -> None:
    rng = np.random.default_rng()
    offsets = offsets_of([scale * count for count in COUNTS[name]])
    w = gpu_tolerance.rounded(rng.standard_normal((8, n, k)), dtype)
    x = gpu_tolerance.rounded(rng.standard_normal((offsets[-1], k)), dtype)
    y = _core.kernels_cuda.grouped_dense(x, offsets, w, dtype, "fused")
    gpu_tolerance.assert_close(y, expected_of(x, offsets, w), gpu_tolerance.OUTPUT[dtype])
    gated = _core.kernels_cuda.grouped_dense(x, offsets, w, dtype, "gated")
    np.testing.assert_array_equal(gated, _core.kernels_cuda.gate(y, "silu", dtype))


def w4_experts(n: int, k: int, group: int, symmetric: bool, dtype: str) -> tuple[list[np.ndarray], tuple]:
    cases = [w4_case(n, k, group, symmetric, dtype) for _ in range(8)]
    stored = [
        None if part[0] is None else np.stack(part) for part in zip(*(c[1] for c in cases), strict=True)
    ]
    return [c[0] for c in cases], tuple(stored)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), [(48, 64, 64), (136, 192, 32), (200, 320, 320), (80, 40, 64)])
@pytest.mark.parametrize("name", COUNTS)
def test_4_bit_experts_in_place(name: str, n: int, k: int, group: int, symmetric: bool, dtype: str) -> None:
    offsets = offsets_of(COUNTS[name])
    weights, stored = w4_experts(n, k, group, symmetric, dtype)
    x = gpu_tolerance.rounded(np.random.default_rng().standard_normal((offsets[-1], k)), dtype)
    y = _core.kernels_cuda.grouped_w4(x, offsets, *stored, n, k, dtype, "in_place")
    gpu_tolerance.assert_close(y, expected_of(x, offsets, weights), gpu_tolerance.OUTPUT[dtype])


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(48, 64, 64), (144, 192, 32), (208, 320, 320), (80, 40, 64), (256, 1024, 128)]
)
@pytest.mark.parametrize("scale", [1, 6, 20])
@pytest.mark.parametrize("name", COUNTS)
def test_4_bit_experts_fused(
    name: str, scale: int, n: int, k: int, group: int, symmetric: bool, dtype: str
) -> None:
    """More rows take kernels of more tokens; gates in the same step are the gates of the product."""
    if scale > 1 and (name in ("few", "first") or not symmetric):
        pytest.skip("the same kernels")
    offsets = offsets_of([scale * count for count in COUNTS[name]])
    weights, stored = w4_experts(n, k, group, symmetric, dtype)
    x = gpu_tolerance.rounded(np.random.default_rng().standard_normal((offsets[-1], k)), dtype)
    y = _core.kernels_cuda.grouped_w4(x, offsets, *stored, n, k, dtype, "fused")
    gpu_tolerance.assert_close(y, expected_of(x, offsets, weights), 2 * gpu_tolerance.OUTPUT[dtype])
    gated = _core.kernels_cuda.grouped_w4(x, offsets, *stored, n, k, dtype, "gated")
    np.testing.assert_array_equal(gated, _core.kernels_cuda.gate(y, "silu", dtype))


@pytest.mark.parametrize("way", ["dense", "dense fused", "in_place", "fused"])
def test_a_row_that_is_not_finite_spoils_no_other(way: str) -> None:
    if "fused" in way and not _core.kernels_cuda.w4_fused_runs():
        pytest.skip("needs a GPU of capability 9.0 and machine code for 90a")
    offsets = offsets_of([9, 0, 20, 1, 0, 0, 3, 0])
    weights, stored = w4_experts(64, 128, 64, True, "float16")
    x = gpu_tolerance.rounded(np.random.default_rng().standard_normal((33, 128)), "float16")
    x[[3, 15]] = np.nan
    if "dense" in way:
        weights = gpu_tolerance.rounded(np.stack(weights), "float16")
        y = _core.kernels_cuda.grouped_dense(
            x, offsets, weights, "float16", way.removeprefix("dense").strip()
        )
    else:
        y = _core.kernels_cuda.grouped_w4(x, offsets, *stored, 64, 128, "float16", way)
    expected = expected_of(x, offsets, weights)
    assert np.isnan(y[[3, 15]]).all()
    kept = np.isfinite(x[:, 0])
    gpu_tolerance.assert_close(y[kept], expected[kept], 2 * gpu_tolerance.OUTPUT["float16"])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("h", [64, 65, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_outputs_of_experts_add_up(shared: bool, h: int, dtype: str) -> None:
    rng = np.random.default_rng()
    tokens, top = 37, 3
    rows = gpu_tolerance.rounded(rng.standard_normal((tokens * top, h)), dtype)
    places = rng.permutation(tokens * top).astype(np.int32)
    weights = rng.uniform(0, 1, (tokens, top)).astype(np.float32)
    expected = (rows.astype(np.float64)[places].reshape(tokens, top, h) * weights[..., None]).sum(1)
    gate = other = None
    if shared:
        gate = rng.uniform(0, 1, tokens).astype(np.float32)
        other = gpu_tolerance.rounded(rng.standard_normal((tokens, h)), dtype)
        expected += gate[:, None] * other
    y = _core.kernels_cuda.moe_combine(rows, places, weights, gate, other, dtype)
    gpu_tolerance.assert_close(y, expected, gpu_tolerance.OUTPUT[dtype])
