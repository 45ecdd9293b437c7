"""Every scheme of the KV cache on the GPU, against fp64 attention over what the CPU backend would store."""

from __future__ import annotations

import gpu_tolerance
import numpy as np
import pytest
from attention_reference import attend, reference

from turbomill import _core

KINDS = {0: (0, 0), 8: (8, 8), 4: (4, 4), 84: (8, 4), 16: (16, 16), 17: (17, 17)}
SCHEMES = [(84, False), (16, False), (17, False), (0, True), (8, True), (4, True), (84, True), (16, True)]
HEADS = [(32, 8, 128), (9, 3, 64), (16, 1, 64), (4, 2, 80), (3, 3, 96), (2, 1, 256), (2, 2, 192), (4, 2, 24)]
# (tokens, context, chunk): prompts, chunks over block borders, decodes
SPANS = [(65, 0, 999), (130, 0, 64), (129, 100, 29), (450, 130, 300), (700, 697, 1), (133, 125, 4)]
BATCHES = {
    "uneven": ([1900, 1, 3, 64, 65, 700, 129, 2], [1] * 8),
    "many": ([1 + 37 * i for i in range(19)], [1] * 19),
    "several": ([300, 70, 41, 5], [4, 2, 1, 3]),
    "mixed": ([500, 90, 400, 33], [1, 90, 1, 20]),
}


def bound(policy: int, rotation: bool, dtype: str) -> float:
    """Queries and outputs of rotated caches are rounded to the format once more; in fp32, where the CPU's
    rotation rounds otherwise, some codes fall to the other side.
    """
    if dtype == "float32" and rotation:
        return 1e-3
    table = gpu_tolerance.ATTENTION_QUANTIZED if policy else gpu_tolerance.ATTENTION
    return table[dtype] * (2 if rotation else 1)


def case(tokens: int, nq: int, nkv: int, d: int, dtype: str) -> np.ndarray:
    values = np.random.default_rng().standard_normal((tokens, nq + 2 * nkv, d)) * 1.5
    values[:, nq : nq + nkv, 3] += 6  # a channel of K that is large at every token
    return gpu_tolerance.rounded(values.reshape(tokens, -1), dtype)


def stored(
    qkv: np.ndarray, nq: int, nkv: int, d: int, policy: int, rotation: bool, centre: bool = False
) -> np.ndarray:
    """qkv [T, (Nq + 2 Nkv) D] with keys and values as the cache gives them back, in the model's own basis."""
    heads = qkv.reshape(len(qkv), -1, d).copy()
    for side, kind in enumerate(KINDS[policy]):
        part = heads[:, nq + side * nkv : nq + (side + 1) * nkv]
        mean = part.mean(0, keepdims=True) if centre and side == 0 else np.zeros((1, 1, d), np.float32)
        rows = np.ascontiguousarray((part - mean).reshape(-1, d))
        rows = _core.kernels.hadamard(rows) if rotation else rows
        rows = _core.kernels.kv_roundtrip(rows, kind)[2] if kind else rows
        rows = _core.kernels.hadamard(rows) if rotation else rows
        part[:] = rows.reshape(part.shape) + mean
    return heads.reshape(qkv.shape)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), HEADS)
@pytest.mark.parametrize(("policy", "rotation"), SCHEMES)
def test_attention_over_what_is_stored(
    policy: int, rotation: bool, nq: int, nkv: int, d: int, dtype: str
) -> None:
    for tokens, context, chunk in SPANS:
        qkv = case(tokens, nq, nkv, d, dtype)
        options = {"quant_policy": policy, "chunk": chunk, "rotation": rotation}
        out = attend(qkv, nq, nkv, d, context, dtype, **options)
        kept = stored(qkv, nq, nkv, d, policy, rotation)
        expected = reference(kept, nq, nkv, d, context)
        gpu_tolerance.assert_close(out, expected, bound(policy, rotation, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(32, 8, 128), (8, 2, 64), (4, 2, 80)])
@pytest.mark.parametrize("policy", [0, 4, 84])
def test_centred_keys(policy: int, nq: int, nkv: int, d: int, dtype: str) -> None:
    """Less their mean over all tokens; what every query sees moves alike, and less is rounded."""
    for tokens, context, chunk in SPANS[1:]:
        qkv = case(tokens, nq, nkv, d, dtype)
        options = {"quant_policy": policy, "chunk": chunk, "rotation": True, "centre": True}
        out = attend(qkv, nq, nkv, d, context, dtype, **options)
        kept = stored(qkv, nq, nkv, d, policy, True, centre=True)
        gpu_tolerance.assert_close(out, reference(kept, nq, nkv, d, context), bound(policy, True, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(32, 8, 128), (8, 2, 64)])
@pytest.mark.parametrize(("policy", "rotation"), SCHEMES)
@pytest.mark.parametrize("name", BATCHES)
def test_sequences_of_a_batch_do_not_meet(
    name: str, policy: int, rotation: bool, nq: int, nkv: int, d: int, dtype: str
) -> None:
    tokens, lengths = BATCHES[name]
    qkvs = [case(t, nq, nkv, d, dtype) for t in tokens]
    out = _core.kernels_cuda.attention_batch(
        qkvs, lengths, nq, nkv, d, quant_policy=policy, cache_dtype=dtype, dtype=dtype, rotation=rotation
    )
    row = 0
    for qkv, length in zip(qkvs, lengths, strict=True):
        kept = stored(qkv, nq, nkv, d, policy, rotation)
        expected = reference(kept, nq, nkv, d, len(qkv) - length)
        gpu_tolerance.assert_close(out[row : row + length], expected, bound(policy, rotation, dtype))
        row += length


@pytest.mark.parametrize("policy", [8, 84, 16, 17])
@pytest.mark.parametrize("d", [24, 64, 128])
def test_codes_equal_the_cpus(policy: int, d: int) -> None:
    x = (np.random.default_rng().standard_normal((96, d)) * 3).astype(np.float32)
    codes, params = _core.kernels_cuda.kv_write(x, policy)
    expected_codes, expected_params, _ = _core.kernels.kv_roundtrip(x, KINDS[policy][1])
    np.testing.assert_array_equal(params, expected_params)
    np.testing.assert_array_equal(codes, expected_codes)
