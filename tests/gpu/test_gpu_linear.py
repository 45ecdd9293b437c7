"""Linears against fp64 references: dense, and every way in which a 4-bit weight is multiplied."""

from __future__ import annotations

from functools import partial

import gpu_tolerance
import numpy as np
import pytest
from fused_cases import FUSED_CASES, fused_kernels, most_splits
from store_packing import pack_codes, pack_params

from turbomill import _core

ROWS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130]
SIZES = [(15, 16), (16, 24), (63, 72), (64, 64), (65, 128), (200, 40), (333, 576), (17000, 136)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("out_fp32", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_dense(n: int, k: int, out_fp32: bool, dtype: str) -> None:
    rng = np.random.default_rng()
    w = gpu_tolerance.rounded(rng.standard_normal((n, k)), dtype)
    bias = rng.standard_normal(n).astype(np.float32)
    out = "float32" if out_fp32 else dtype
    for rows in ROWS:
        x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), dtype)
        expected = x.astype(np.float64) @ w.astype(np.float64).T + bias
        y = _core.kernels_cuda.dense_linear(x, w, bias, dtype=dtype, out_dtype=out)
        # The bias is added to a product that is already rounded.
        gpu_tolerance.assert_close(y, expected, 1.5 * gpu_tolerance.OUTPUT[out])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (208, 320), (512, 2056), (17024, 72)])
def test_dense_fused_gates_as_the_gates_own_kernel(n: int, k: int, dtype: str) -> None:
    """The same bits, from sums in one block and from sums of several."""
    if not _core.kernels_cuda.w4_fused_runs():
        pytest.skip("needs a GPU of capability 9.0 and machine code for 90a")
    rng = np.random.default_rng()
    w = gpu_tolerance.rounded(rng.standard_normal((n, k)), dtype)
    bias = rng.standard_normal(n).astype(np.float32)
    for rows in (1, 8, 9, 17, 33, 64):
        x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), dtype)
        whole, gated = (
            _core.kernels_cuda.dense_linear(x, w, bias, dtype=dtype, out_dtype=dtype, gated=gate)
            for gate in (False, True)
        )
        assert np.abs(gated).max() > 0
        np.testing.assert_array_equal(gated, _core.kernels_cuda.gate(whole, "silu", dtype))


W4_CASES = [
    (15, 64, 32),
    (64, 64, 64),
    (65, 128, 32),
    (80, 192, 64),
    (200, 256, 128),
    (16, 40, 64),
    (48, 256, 256),
    (128, 4096, 128),
    (64, 1088, 32),
    (8448, 1024, 64),
]


def w4_case(n: int, k: int, group: int, symmetric: bool, dtype: str) -> tuple[np.ndarray, tuple]:
    """A weight [N, K] in fp64, and its stored form, where K is padded to tiles of 64."""
    rng = np.random.default_rng()
    padded = -(-k // 64) * 64
    groups = padded // group
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = gpu_tolerance.rounded(rng.uniform(0.01, 0.1, (n, groups)), dtype)
    zeros = np.full((n, groups), 8.0) if symmetric else rng.integers(0, 16, (n, groups)).astype(np.float64)
    at = np.arange(k) // group
    w = (codes - zeros[:, at]) * scales[:, at].astype(np.float64)
    stored_zeros = None if symmetric else gpu_tolerance.bits(pack_params(zeros.astype(np.float32)), dtype)
    return w, (pack_codes(codes), gpu_tolerance.bits(pack_params(scales), dtype), stored_zeros)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), W4_CASES)
def test_w4_in_place_rounds_no_weight(n: int, k: int, group: int, symmetric: bool, dtype: str) -> None:
    rng = np.random.default_rng()
    w, stored = w4_case(n, k, group, symmetric, dtype)
    bias = rng.standard_normal(n).astype(np.float32)
    for rows in ROWS:
        x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), dtype)
        expected = x.astype(np.float64) @ w.T + bias
        for out in (dtype, "float32"):
            y = _core.kernels_cuda.w4_linear(
                x, *stored, n, k, bias, dtype=dtype, scale_dtype=dtype, out_dtype=out, way="in_place"
            )
            gpu_tolerance.assert_close(y, expected, gpu_tolerance.OUTPUT[out])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), W4_CASES)
def test_w4_as_dense(n: int, k: int, group: int, symmetric: bool, dtype: str) -> None:
    rng = np.random.default_rng()
    w, stored = w4_case(n, k, group, symmetric, dtype)
    for rows in (1, 17, 130):
        x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), dtype)
        y = _core.kernels_cuda.w4_linear(
            x, *stored, n, k, dtype=dtype, scale_dtype=dtype, out_dtype=dtype, way="as_dense"
        )
        # Weights are rounded too.
        gpu_tolerance.assert_close(y, x.astype(np.float64) @ w.T, 2 * gpu_tolerance.OUTPUT[dtype])


@pytest.fixture
def fused() -> list[tuple[int, int, int]]:
    return fused_kernels(4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), FUSED_CASES)
def test_w4_fused(fused: list, n: int, k: int, group: int, symmetric: bool, dtype: str) -> None:
    """Every kernel and several splits of K, rows around its tile."""
    rng = np.random.default_rng()
    unrounded, stored = w4_case(n, k, group, symmetric, dtype)
    w = gpu_tolerance.rounded(unrounded, dtype).astype(np.float64)
    bias = rng.standard_normal(n).astype(np.float32)
    for number, (warpgroups, tokens, blocks) in enumerate(fused):
        most = most_splits(warpgroups, k)
        for splits in {1, min(most, 2 + number % 7)}:
            for rows in {1, tokens, tokens + 1}:
                x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), dtype)
                out = dtype if (number + splits + rows) % 2 else "float32"
                y = _core.kernels_cuda.w4_linear(
                    x,
                    *stored,
                    n,
                    k,
                    bias,
                    dtype=dtype,
                    scale_dtype=dtype,
                    out_dtype=out,
                    way="fused",
                    plan=(warpgroups, tokens, blocks, splits),
                )
                # Kernels of up to 16 tokens round no weight; tensor cores add a little less exactly.
                exact = unrounded if tokens <= 16 else w
                bound = max(gpu_tolerance.OUTPUT[out], 1e-5)
                gpu_tolerance.assert_close(y, x.astype(np.float64) @ exact.T + bias, bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, 32), (208, 320, 320), (512, 1088, 64)])
def test_w4_fused_gates_as_the_gates_own_kernel(fused: list, n: int, k: int, group: int, dtype: str) -> None:
    """The same bits, from sums in one block and from sums of several."""
    rng = np.random.default_rng()
    _, stored = w4_case(n, k, group, False, dtype)
    bias = rng.standard_normal(n).astype(np.float32)
    for warpgroups, tokens, blocks in fused:
        for splits in {1, most_splits(warpgroups, k, 3)}:
            for rows in (1, tokens + 1):
                x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), dtype)
                plan = (warpgroups, tokens, blocks, splits)
                options = {"dtype": dtype, "scale_dtype": dtype, "out_dtype": dtype, "plan": plan}
                whole, gated = (
                    _core.kernels_cuda.w4_linear(x, *stored, n, k, bias, way=way, **options)
                    for way in ("fused", "gated")
                )
                assert np.abs(gated).max() > 0
                np.testing.assert_array_equal(gated, _core.kernels_cuda.gate(whole, "silu", dtype))


def test_w4_fused_takes_the_engines_choice(fused: list) -> None:
    """Whatever the table or the estimate says for a shape runs, at any number of rows."""
    rng = np.random.default_rng()
    for n, k in ((64, 64), (4096, 256), (576, 576), (49152, 128)):
        w, stored = w4_case(n, k, 64, True, "float16")
        w = gpu_tolerance.rounded(w, "float16").astype(np.float64)
        for rows in (1, 5, 16, 17, 48, 100, 300, 700):
            x = gpu_tolerance.rounded(rng.standard_normal((rows, k)), "float16")
            y = _core.kernels_cuda.w4_linear(
                x, *stored, n, k, dtype="float16", scale_dtype="float16", out_dtype="float16"
            )
            gpu_tolerance.assert_close(y, x.astype(np.float64) @ w.T, gpu_tolerance.OUTPUT["float16"])


def test_w4_fused_rows_do_not_depend_on_each_other(fused: list) -> None:
    """With one plan, a row's result is the same bits whatever lies beside it, every time."""
    _, stored = w4_case(256, 4096, 128, True, "float16")
    rng = np.random.default_rng()
    x = gpu_tolerance.rounded(rng.standard_normal((20, 4096)), "float16")
    other = gpu_tolerance.rounded(rng.standard_normal((20, 4096)), "float16")
    other[7] = x[7]

    def run(x: np.ndarray) -> np.ndarray:
        return _core.kernels_cuda.w4_linear(
            x,
            *stored,
            256,
            4096,
            dtype="float16",
            scale_dtype="float16",
            out_dtype="float32",
            way="fused",
            plan=(2, 32, 2, 8),
        )

    first = run(x)
    np.testing.assert_array_equal(run(other)[7], first[7])
    for _ in range(5):
        np.testing.assert_array_equal(run(x), first)


def test_w4_fused_overlapping_launches_wait_for_their_input(fused: list) -> None:
    rng = np.random.default_rng()
    low, high = rng.integers(1, 16, (2, 32, 32, 4, 32, 16), np.uint8)  # of mean 8: nothing grows
    codes = low | high << 4
    scales = gpu_tolerance.bits(np.full((32, 16, 64), 2.0**-8, np.float32), "float16")
    for rows in (1, 16, 40, 300):
        x = gpu_tolerance.rounded(rng.standard_normal((rows, 2048)), "float16")
        chain = partial(_core.kernels_cuda.w4_chain, x, codes, scales, 12, dtype="float16")
        gpu_tolerance.assert_overlap_changes_nothing(lambda overlap, chain=chain: chain(overlap=overlap))


def test_w4_fused_refuses_a_plan_without_a_kernel(fused: list) -> None:
    _, stored = w4_case(64, 128, 64, True, "float16")
    for plan in ((5, 8, 1, 1), (2, 8, 2, 9), (2, 8, 2, 3), (2, 8, 2, 0), (7, 128, 1, 2)):
        with pytest.raises(ValueError, match="fused linear"):
            _core.kernels_cuda.w4_linear(
                np.zeros((1, 128), np.float32),
                *stored,
                64,
                128,
                dtype="float16",
                scale_dtype="float16",
                out_dtype="float16",
                way="fused",
                plan=plan,
            )


@pytest.mark.parametrize(("dtype", "scale_dtype"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_scales_of_another_type_than_activations(dtype: str, scale_dtype: str) -> None:
    w, stored = w4_case(80, 192, 64, False, scale_dtype)
    for way, bound in (("in_place", 1), ("as_dense", 2), ("", 2)):
        x = gpu_tolerance.rounded(np.random.default_rng().standard_normal((5, 192)), dtype)
        y = _core.kernels_cuda.w4_linear(
            x, *stored, 80, 192, dtype=dtype, scale_dtype=scale_dtype, out_dtype=dtype, way=way
        )
        gpu_tolerance.assert_close(y, x.astype(np.float64) @ w.T, bound * gpu_tolerance.OUTPUT[dtype])


def test_w4_gives_the_same_bits_every_time() -> None:
    """Partial sums of a split K are added in order, whichever block arrives last."""
    _, stored = w4_case(64, 8192, 128, True, "float16")
    x = gpu_tolerance.rounded(np.random.default_rng().standard_normal((3, 8192)), "float16")
    runs = [
        _core.kernels_cuda.w4_linear(
            x, *stored, 64, 8192, dtype="float16", scale_dtype="float16", out_dtype="float32", way="in_place"
        )
        for _ in range(5)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])
