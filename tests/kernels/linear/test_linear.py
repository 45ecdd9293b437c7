from __future__ import annotations

import linear_reference as reference
import numpy as np
import pytest
import tolerance

from turbomill._core import cpu_features, kernels

# Rows on both sides of the small-batch kernels' limit (8); N and K that straddle tiles of 16 and 64.
ROWS = [1, 2, 7, 8, 9, 17]
SIZES = [(15, 16), (16, 17), (63, 65), (64, 64), (80, 200), (200, 31)]


def dense_case(n: int, k: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * 1000 + k)
    w = reference.round_to(rng.standard_normal((n, k)), dtype)
    return w, w if dtype == "float32" else reference.TO_BITS[dtype](w)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_dense(n: int, k: int, dtype: str, isa: str) -> None:
    w, stored = dense_case(n, k, dtype)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
        y = kernels.dense_linear(x, stored, dtype, bias.tolist(), isa, threads=2)
        tolerance.assert_close(y, reference.linear(x, w) + bias, dtype)


W4_CASES = [
    (15, 64, 32),
    (64, 64, 64),
    (65, 128, 32),
    (80, 192, 64),
    (200, 256, 128),
    (16, 64, 64),
    (48, 256, 256),
]


PACK = {4: reference.pack_codes, 8: reference.pack_bytes}


def packed_case(n: int, k: int, group: int, bits: int, symmetric: bool, dtype: str):
    """A weight [N, K] in fp32, and the arguments of packed_linear that stand for it."""
    rng = np.random.default_rng(n + k + group)
    codes = rng.integers(0, 2**bits, (n, k), dtype=np.uint8)
    scales = reference.round_to(rng.uniform(0.01, 0.1, (n, k // group)), dtype)
    zeros = rng.integers(0, 2**bits, (n, k // group)).astype(np.float32)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    expand = np.arange(k) // group
    w = (codes.astype(np.float32) - zeros[:, expand]) * scales[:, expand]
    to_bits = reference.TO_BITS[dtype]
    packed_scales = to_bits(reference.pack_params(scales, k // group))
    packed_zeros = None if symmetric else to_bits(reference.pack_params(zeros, k // group))
    return w, (PACK[bits](codes), packed_scales, packed_zeros, n, k, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), W4_CASES)
def test_packed(n: int, k: int, group: int, bits: int, symmetric: bool, dtype: str, isa: str) -> None:
    rng = np.random.default_rng(n)
    w, stored = packed_case(n, k, group, bits, symmetric, dtype)
    np.testing.assert_array_equal(kernels.packed_expand(*stored), w)
    for rows in ROWS:
        x = rng.standard_normal((rows, k)).astype(np.float32)
        y = kernels.packed_linear(x, *stored, isa, threads=2)
        tolerance.assert_close(y, reference.linear(x, w), "w4")


needs_bytes = pytest.mark.skipif(not cpu_features()["int8"], reason="this CPU has no AVX-512 VNNI")
# Straddles the 8 rows, 64 rows and 16 tiles of K that are multiplied at a time.
BYTE_ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 64, 65, 130]


@needs_bytes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [*W4_CASES, (33, 1088, 32), (17, 2112, 64)])
@pytest.mark.parametrize("activations", [8, 16])
def test_packed_with_activations_of_bytes(
    n: int, k: int, group: int, bits: int, symmetric: bool, dtype: str, activations: int
) -> None:
    """What is left is the rounding of the inputs: of rounded inputs, the products are as exact as fp32's."""
    rng = np.random.default_rng(n)
    w, stored = packed_case(n, k, group, bits, symmetric, dtype)
    for rows in BYTE_ROWS:
        x = rng.standard_normal((rows, k)).astype(np.float32)
        x[rows // 2] *= 100
        x[rows // 3, :64] = 0
        y = kernels.packed_linear(x, *stored, threads=2, activation_bits=activations)
        tolerance.assert_close(y, reference.linear(reference.rounded(x, activations), w), "w4")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k", "group"), [(15, 64, 32), (65, 192, 64), (80, 96, 32), (48, 256, 256)])
def test_w4_with_minima_and_an_order(n: int, k: int, group: int, dtype: str, isa: str) -> None:
    """code * scale + min, where column i meets input order[i]; scales of any sign. K = 96 has padding."""
    rng = np.random.default_rng(n + k + group)
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    stored = -(-k // 64) * 64 // group  # groups, those beyond K too
    inside = (np.arange(stored) * group < k)[None]
    scales = reference.round_to(rng.uniform(0.01, 0.1, (n, stored)) * rng.choice([-1, 1], (n, stored)), dtype)
    mins = reference.round_to(rng.uniform(-1, 1, (n, stored)), dtype)
    scales, mins = scales * inside, mins * inside
    order = rng.permutation(k)
    expand = np.arange(k) // group
    w = np.empty((n, k), np.float32)
    w[:, order] = codes.astype(np.float32) * scales[:, expand] + mins[:, expand]
    bits = reference.TO_BITS[dtype]
    tensors = (reference.pack_codes(codes), bits(reference.pack_params(scales, stored)), None, n, k, dtype)
    beside = {"mins": bits(reference.pack_params(mins, stored)), "order": order.tolist()}
    np.testing.assert_array_equal(kernels.packed_expand(*tensors, **beside), w)
    for rows in ROWS:
        x = rng.standard_normal((rows, k)).astype(np.float32)
        y = kernels.packed_linear(x, *tensors, isa, threads=2, **beside)
        tolerance.assert_close(y, reference.linear(x, w), "w4")
        if cpu_features()["int8"]:
            for activations in (8, 16):
                rounded = np.empty_like(x)
                rounded[:, order] = reference.rounded(x[:, order], activations)
                y = kernels.packed_linear(x, *tensors, isa, 2, **beside, activation_bits=activations)
                tolerance.assert_close(y, reference.linear(rounded, w), "w4")


def test_w4_reads_no_further_than_k(isa: str) -> None:
    """K = 32 is padded to a tile of 64: codes there are zero and scales too, whatever x would be."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (16, 32), dtype=np.uint8)
    scales = np.zeros((16, 2), np.float32)
    scales[:, 0] = 0.5
    zeros = np.full((16, 2), 3.0, np.float32)
    bits = reference.TO_BITS["float16"]
    x = rng.standard_normal((1, 32)).astype(np.float32)
    y = kernels.packed_linear(
        x,
        reference.pack_codes(codes),
        bits(reference.pack_params(scales, 2)),
        bits(reference.pack_params(zeros, 2)),
        16,
        32,
        "float16",
        isa,
    )
    tolerance.assert_close(y, reference.linear(x, (codes - 3.0) * 0.5), "w4")


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="mmx"):
        kernels.dense_linear(np.zeros((1, 4), np.float32), np.zeros((4, 4), np.float32), "float32", [], "mmx")
