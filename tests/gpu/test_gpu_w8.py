"""8-bit weights on the GPU against fp64 references: products in every way there is, embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import gpu_tolerance
import numpy as np
import pytest
from fused_cases import FUSED_CASES, fused_kernels, most_splits
from store_packing import pack_bytes, pack_params

from turbomill import _core

FEW = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32]
MANY = [33, 63, 64, 65, 130, 300, 385, 512]
CASES = [  # N, K, group
    (15, 64, 32),
    (64, 64, 64),
    (65, 128, 32),
    (80, 192, 64),
    (200, 256, 128),
    (16, 40, 64),
    (129, 256, 256),
    (128, 4096, 128),
    (64, 1088, 32),
    (8448, 1024, 64),
]
KINDS = ["symmetric", "zeros", "minima"]


class Case:
    """A weight [N, K] in fp64, and its stored form, where K is padded to tiles of 64."""

    def __init__(self, n: int, k: int, group: int, kind: str, dtype: str, bits: int = 8) -> None:
        rng = np.random.default_rng()
        groups = -(-k // 64) * 64 // group
        codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
        codes.ravel()[:2] = 0, (1 << bits) - 1
        scales = gpu_tolerance.rounded(rng.uniform(0.001, 0.01, (n, groups)), dtype)
        beside = np.full((n, groups), 128.0, np.float32)
        if kind == "zeros":
            beside = rng.integers(0, 1 << bits, (n, groups)).astype(np.float32)
        elif kind == "minima":
            beside = gpu_tolerance.rounded(rng.uniform(-1, 0.2, (n, groups)), dtype)
        at = np.arange(k) // group
        scale, other = scales[:, at].astype(np.float64), beside[:, at].astype(np.float64)
        self.w = codes * scale + other if kind == "minima" else (codes - other) * scale
        packed = gpu_tolerance.bits(pack_params(beside), dtype)
        self.n, self.k, self.dtype = n, k, dtype
        self.stored = {
            "codes": pack_bytes(codes),
            "scales": gpu_tolerance.bits(pack_params(scales), dtype),
            "zeros": packed if kind == "zeros" else None,
            "mins": packed if kind == "minima" else None,
        }

    def times(self, x: np.ndarray, dtype: str, out: str, **options: Any) -> np.ndarray:
        return _core.kernels_cuda.w8_linear(
            x,
            **self.stored,
            n=self.n,
            k=self.k,
            dtype=dtype,
            scale_dtype=self.dtype,
            out_dtype=out,
            **options,
        )


def normal(rows: int, k: int, dtype: str) -> np.ndarray:
    return gpu_tolerance.rounded(np.random.default_rng().standard_normal((rows, k)), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_few_rows_round_no_weight(n: int, k: int, group: int, kind: str, dtype: str) -> None:
    case = Case(n, k, group, kind, dtype)
    bias = np.random.default_rng().standard_normal(n).astype(np.float32)
    for rows in FEW:
        x = normal(rows, k, dtype)
        expected = x.astype(np.float64) @ case.w.T + bias
        for out in (dtype, "float32"):
            y = case.times(x, dtype, out, bias=bias, way="in_place")
            gpu_tolerance.assert_close(y, expected, gpu_tolerance.OUTPUT[out])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
@pytest.mark.parametrize("way", ["in_place", "as_dense", ""])
def test_many_rows_round_the_weight_once(way: str, n: int, k: int, group: int, kind: str, dtype: str) -> None:
    case = Case(n, k, group, kind, dtype)
    bias = np.random.default_rng().standard_normal(n).astype(np.float32)
    for rows in MANY:
        x = normal(rows, k, dtype)
        y = case.times(x, dtype, dtype, bias=bias, way=way)
        gpu_tolerance.assert_close(y, x.astype(np.float64) @ case.w.T + bias, 2 * gpu_tolerance.OUTPUT[dtype])


MOST_BY_WARPS = 16  # tokens of kernels that round no weight, and take no minima
MINIMA_CASES = [(n, k, group) for n, k, group in FUSED_CASES if group <= 64 and group < k]


@pytest.fixture
def fused() -> list[tuple[int, int, int]]:
    return fused_kernels(8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "k", "group", "kind"),
    # Minima: in several groups of 32 or 64.
    [(*case, kind) for kind in KINDS for case in FUSED_CASES if kind != "minima" or case in MINIMA_CASES],
)
def test_fused(fused: list, n: int, k: int, group: int, kind: str, dtype: str) -> None:
    """Every kernel and several splits of K, rows around its tile."""
    case = Case(n, k, group, kind, dtype)
    rounded = gpu_tolerance.rounded(case.w, dtype).astype(np.float64)
    bias = np.random.default_rng().standard_normal(n).astype(np.float32)
    for number, (warpgroups, tokens, blocks) in enumerate(fused):
        if kind == "minima" and tokens <= MOST_BY_WARPS:
            continue
        most = most_splits(warpgroups, k)
        for splits in {1, min(most, 2 + number % 7)}:
            for rows in {17 if kind == "minima" else 1, tokens, tokens + 1}:
                x = normal(rows, k, dtype)
                out = dtype if (number + splits + rows) % 2 else "float32"
                plan = (warpgroups, tokens, blocks, splits)
                y = case.times(x, dtype, out, bias=bias, way="fused", plan=plan)
                w = case.w if tokens <= MOST_BY_WARPS else rounded
                # Tensor cores add a little less exactly.
                bound = max(gpu_tolerance.OUTPUT[out], 1e-5)
                gpu_tolerance.assert_close(y, x.astype(np.float64) @ w.T + bias, bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "k", "group", "kind"),
    [(16, 64, 32, "zeros"), (208, 320, 320, "zeros"), (512, 1088, 64, "minima")],
)
def test_fused_gates_as_the_gates_own_kernel(
    fused: list, n: int, k: int, group: int, kind: str, dtype: str
) -> None:
    """The same bits, from sums in one block and from sums of several."""
    case = Case(n, k, group, kind, dtype)
    bias = np.random.default_rng().standard_normal(n).astype(np.float32)
    for warpgroups, tokens, blocks in fused:
        if kind == "minima" and tokens <= MOST_BY_WARPS:
            continue
        for splits in {1, most_splits(warpgroups, k, 3)}:
            for rows in (17, tokens + 1):
                x = normal(rows, k, dtype)
                plan = (warpgroups, tokens, blocks, splits)
                whole, gated = (
                    case.times(x, dtype, dtype, bias=bias, way=way, plan=plan) for way in ("fused", "gated")
                )
                assert np.abs(gated).max() > 0
                np.testing.assert_array_equal(gated, _core.kernels_cuda.gate(whole, "silu", dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_choice_runs_for_any_shape(kind: str) -> None:
    for n, k in ((64, 64), (4096, 256), (576, 576), (9000, 128)):
        case = Case(n, k, 64, kind, "float16")
        for rows in (1, 5, 16, 17, 48, 100, 300, 700):
            x = normal(rows, k, "float16")
            y = case.times(x, "float16", "float16")
            gpu_tolerance.assert_close(
                y, x.astype(np.float64) @ case.w.T, 2 * gpu_tolerance.OUTPUT["float16"]
            )


def test_fused_refuses_a_plan_without_a_kernel(fused: list) -> None:
    case, x = Case(64, 128, 64, "zeros", "float16"), np.zeros((20, 128), np.float32)
    for plan in ((5, 8, 1, 1), (2, 8, 2, 9), (2, 8, 2, 3), (2, 8, 2, 0), (7, 128, 1, 2)):
        with pytest.raises(ValueError, match="fused linear"):
            case.times(x, "float16", "float16", way="fused", plan=plan)
    minima = Case(64, 128, 64, "minima", "float16")
    with pytest.raises(ValueError, match="minima"):
        minima.times(x, "float16", "float16", way="fused", plan=(2, 8, 2, 1))
    for case, rows in ((minima, 16), (Case(64, 128, 128, "minima", "float16"), 20)):
        with pytest.raises(ValueError, match="do not fit"):
            case.times(x[:rows], "float16", "float16", way="fused", plan=(2, 32, 2, 1))


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_codes_of_fewer_bits(bits: int) -> None:
    case = Case(80, 192, 32, "zeros", "float16", bits)
    for rows in (1, 20, 70):
        x = normal(rows, 192, "float16")
        y = case.times(x, "float16", "float16")
        gpu_tolerance.assert_close(y, x.astype(np.float64) @ case.w.T, 2 * gpu_tolerance.OUTPUT["float16"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_split_of_k_gives_the_same_bits_each_time(kind: str) -> None:
    """Partial sums are added in order, whichever block arrives last, and nothing is left in the counters."""
    case = Case(200, 4096, 128, kind, "float16")
    for rows in (1, 9, 20, 70, 150):
        x = normal(rows, 4096, "float16")
        expected = x.astype(np.float64) @ case.w.T
        bound = gpu_tolerance.OUTPUT["float32"] if rows <= 32 else gpu_tolerance.OUTPUT["float16"]
        for splits in (1, 2, 3, 7, 16):
            first, *others = (
                case.times(x, "float16", "float32", way="in_place", splits=splits) for _ in range(4)
            )
            gpu_tolerance.assert_close(first, expected, bound)
            for other in others:
                np.testing.assert_array_equal(other, first)


def test_rows_do_not_depend_on_each_other() -> None:
    case = Case(256, 2048, 128, "zeros", "bfloat16")
    x, other = normal(20, 2048, "bfloat16"), normal(20, 2048, "bfloat16")
    other[7] = x[7]
    one, two = (case.times(v, "bfloat16", "float32") for v in (x, other))
    np.testing.assert_array_equal(one[7], two[7])


@pytest.mark.parametrize(("dtype", "scale_dtype"), [("bfloat16", "float16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_another_type_than_activations(kind: str, dtype: str, scale_dtype: str) -> None:
    case = Case(80, 192, 64, kind, scale_dtype)
    for way, bound in (("in_place", 1), ("as_dense", 2), ("", 2)):
        for rows in (5, 70):
            x = normal(rows, 192, dtype)
            y = case.times(x, dtype, dtype, way=way)
            gpu_tolerance.assert_close(
                y, x.astype(np.float64) @ case.w.T, bound * gpu_tolerance.OUTPUT[dtype]
            )


def test_a_k_that_copies_cannot_cut() -> None:
    """K is even, but not a multiple of eight: only as a dense matrix."""
    case = Case(80, 70, 64, "zeros", "float16")
    for rows in (1, 40):
        x = normal(rows, 70, "float16")
        gpu_tolerance.assert_close(
            case.times(x, "float16", "float16"),
            x.astype(np.float64) @ case.w.T,
            2 * gpu_tolerance.OUTPUT["float16"],
        )


@pytest.mark.parametrize("out", ["float16", "float32"])
def test_a_large_weight_is_made_dense_in_pieces(out: str) -> None:
    case = Case(333, 256, 64, "zeros", "float16")
    bias = np.random.default_rng().standard_normal(333).astype(np.float32)
    x = normal(70, 256, "float16")
    whole = case.times(x, "float16", out, bias=bias, way="as_dense")
    gpu_tolerance.assert_close(
        whole, x.astype(np.float64) @ case.w.T + bias, 2 * gpu_tolerance.OUTPUT["float16"]
    )
    for rows_at_a_time in (128, 140, 320):
        pieces = case.times(x, "float16", out, bias=bias, way="as_dense", room=rows_at_a_time * 256)
        gpu_tolerance.assert_close(pieces, whole.astype(np.float64), gpu_tolerance.OUTPUT["float16"])


@pytest.mark.parametrize("way", ["in place", "fused"])
def test_overlapping_launches_wait_for_their_input(way: str) -> None:
    if way == "fused" and not _core.kernels_cuda.w4_fused_runs():
        pytest.skip("needs a GPU of capability 9.0 and machine code for 90a")
    rng = np.random.default_rng()
    codes = rng.integers(96, 161, (32, 32, 4, 8, 2, 64), np.uint8)  # of mean 128: nothing grows
    scales = gpu_tolerance.bits(np.full((32, 16, 64), 2.0**-10, np.float32), "float16")
    for rows in (1, 16, 20, 40, 150, 300):
        x = normal(rows, 2048, "float16")
        chain = partial(
            _core.kernels_cuda.w8_chain, x, codes, scales, 12, dtype="float16", fused=way == "fused"
        )
        gpu_tolerance.assert_overlap_changes_nothing(lambda overlap, chain=chain: chain(overlap=overlap))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), [(15, 64, 32), (200, 256, 128), (300, 40, 64), (70, 70, 32)])
def test_embedding(n: int, k: int, group: int, kind: str, dtype: str) -> None:
    """Rows as the CPU backend reads them, in fp32, and the last token of a slot for an id below 0."""
    case = Case(n, k, group, kind, dtype)
    table = _core.kernels.packed_expand(**case.stored, n=n, k=k, dtype=dtype)
    np.testing.assert_allclose(table, case.w, rtol=1e-5, atol=1e-6)
    ids, last = [0, n - 1, 9, -1, n // 2, -3, 8], [3, 0, n - 2]
    rows = [i if i >= 0 else last[-1 - i] for i in ids]
    x = _core.kernels_cuda.embed_w8(ids, last, **case.stored, n=n, k=k, scale_dtype=dtype, factor=1.5)
    np.testing.assert_allclose(x, 1.5 * table[rows], rtol=1e-6, atol=1e-6)
