"""What sets models apart in attention: sliding windows, capped scores, other scales, norms of heads. Every
kernel: plain fp32, tensor cores, decodes over one line of keys, prompts on Hopper."""

from __future__ import annotations

from typing import Any

import gpu_tolerance
import numpy as np
import pytest
from attention_reference import attend, normed_heads, reference, rotated, stored_rows
from test_gpu_attention import case

from turbomill import _core

# Heads for each kernel that decodes and prompts may get; 256 and 192 have none of their own for decodes.
HEADS = [(8, 2, 64), (8, 2, 128), (4, 1, 80), (6, 3, 96), (4, 2, 256), (2, 1, 192), (4, 2, 24), (16, 1, 64)]
# (tokens, context, chunk): as in test_gpu_attention, longer than any window here.
SPANS = [
    (65, 0, 999),
    (400, 130, 270),
    (500, 497, 1),
    (449, 448, 1),
    (133, 125, 4),
    (300, 256, 40),
]
CODE_FLIPS = 5e-4  # what a few codes of a cache of 8 bits are worth; 6e-5 was seen
# scale: times the usual D ** -0.5.
VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": 100},
    "window-of-a-block": {"window": 64},
    "window-of-few": {"window": 3},
    "window-of-one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 1.5},
    "all": {"window": 200, "softcap": 5.0, "scale": 1.2},
}


def variant_of(name: str, d: int) -> dict[str, Any]:
    variant = VARIANTS[name]
    return variant | {"scale": variant["scale"] * d**-0.5} if "scale" in variant else variant


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), HEADS)
@pytest.mark.parametrize("name", VARIANTS)
def test_plain_cache(name: str, nq: int, nkv: int, d: int, dtype: str) -> None:
    variant = variant_of(name, d)
    for tokens, context, chunk in SPANS:
        qkv = case(tokens, nq, nkv, d, dtype)
        out = attend(qkv, nq, nkv, d, context, dtype, chunk=chunk, **variant)
        expected = reference(qkv, nq, nkv, d, context, **variant)
        gpu_tolerance.assert_close(out, expected, gpu_tolerance.ATTENTION[dtype])
        if tokens > 200 and name != "scale":  # a kernel that ignores the variant would be far off
            plain = reference(qkv, nq, nkv, d, context)
            assert np.linalg.norm(plain - expected) > 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(8, 2, 64), (8, 2, 128), (6, 3, 96), (4, 2, 256)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["window", "softcap", "all"])
def test_quantized_cache(name: str, bits: int, nq: int, nkv: int, d: int, dtype: str) -> None:
    variant = variant_of(name, d)
    for tokens, context, chunk in SPANS:
        qkv = case(tokens, nq, nkv, d, dtype)
        out = attend(qkv, nq, nkv, d, context, dtype, quant_policy=bits, chunk=chunk, **variant)
        expected = reference(stored_rows(qkv, nq, d, bits), nq, nkv, d, context, **variant)
        gpu_tolerance.assert_close(out, expected, gpu_tolerance.ATTENTION_QUANTIZED[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(8, 2, 128), (8, 2, 64), (6, 3, 96)])
@pytest.mark.parametrize("bits", [16, 8])
def test_windows_of_a_batch(bits: int, nq: int, nkv: int, d: int, dtype: str) -> None:
    """Decodes shorter and much longer than the window, several new tokens, and prompts, in one step."""
    variant = {"window": 150, "softcap": 4.0}
    for tokens, lengths in (
        ([1900, 1, 3, 64, 150, 151, 700, 215], [1] * 8),
        ([300, 170, 41, 5], [4, 2, 1, 3]),
        ([500, 90, 400, 633], [1, 90, 1, 320]),
    ):
        qkvs = [case(t, nq, nkv, d, dtype) for t in tokens]
        out = _core.kernels_cuda.attention_batch(
            qkvs, lengths, nq, nkv, d, quant_policy=bits % 16, cache_dtype=dtype, dtype=dtype, **variant
        )
        bound = (gpu_tolerance.ATTENTION if bits == 16 else gpu_tolerance.ATTENTION_QUANTIZED)[dtype]
        row = 0
        for qkv, length in zip(qkvs, lengths, strict=True):
            kept = qkv if bits == 16 else stored_rows(qkv, nq, d, bits)
            expected = reference(kept, nq, nkv, d, len(qkv) - length, **variant)
            gpu_tolerance.assert_close(out[row : row + length], expected, bound)
            row += length


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(4, 2, 64), (8, 1, 128), (4, 2, 80), (2, 1, 256)])
@pytest.mark.parametrize("bits", [16, 8])
def test_norms_of_heads(bits: int, nq: int, nkv: int, d: int, dtype: str) -> None:
    """Before the rotation, of queries and keys alone; and of what the cache holds."""
    rng = np.random.default_rng()
    inv_freq = (10000.0 ** (-np.arange(0, d, 2) / d)).astype(np.float32)
    q_norm, k_norm = (rng.uniform(0.5, 1.5, d).astype(np.float32) for _ in range(2))
    bound = {"float32": 1e-5, "float16": 1.5e-3, "bfloat16": 1e-2}[dtype]
    for tokens, context, chunk in ((150, 0, 999), (150, 149, 1), (150, 120, 7)):
        qkv = case(tokens, nq, nkv, d, dtype)
        norms = {"q_norm": q_norm.tolist(), "k_norm": k_norm.tolist()}
        options = {"quant_policy": bits % 16, "inv_freq": inv_freq.tolist(), "chunk": chunk, **norms}
        out = attend(qkv, nq, nkv, d, context, dtype, **options)
        if bits == 16:
            expected = reference(qkv, nq, nkv, d, context, inv_freq, q_norm=q_norm, k_norm=k_norm)
            gpu_tolerance.assert_close(out, expected, bound)
        else:
            wide = qkv.astype(np.float64).reshape(tokens, nq + 2 * nkv, d)
            wide[:, :nq] = rotated(normed_heads(wide[:, :nq], q_norm), inv_freq)
            wide[:, nq : nq + nkv] = rotated(normed_heads(wide[:, nq : nq + nkv], k_norm), inv_freq)
            kept = stored_rows(wide.reshape(tokens, -1).astype(np.float32), nq, d, bits)
            # A code may fall to the other side where the kernel's fp32 differs in its last bit.
            gpu_tolerance.assert_close(out, reference(kept, nq, nkv, d, context), max(4 * bound, CODE_FLIPS))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rotary", [16, 32])
def test_partial_rotation(rotary: int, d: int, dtype: str) -> None:
    inv_freq = (10000.0 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    qkv = case(150, 4, 2, d, dtype)
    bound = {"float32": 1e-5, "float16": 1.25e-3}[dtype]
    for context, chunk in ((0, 999), (149, 1)):
        out = attend(qkv, 4, 2, d, context, dtype, inv_freq=inv_freq.tolist(), chunk=chunk)
        gpu_tolerance.assert_close(out, reference(qkv, 4, 2, d, context, inv_freq), bound)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 1000, 50000])
def test_a_windows_work_is_the_window(window: int) -> None:
    """Units of 64 keys that decodes take: those from the window's first key on."""
    keys = [1, 63, 64, 65, 700, 30000]
    firsts, ranges = _core.kernels_cuda.decode_ranges(keys, 8, 2, 0, 132, padding=1, window=window)
    units = [-(-k // 64) - max(0, k - window) // 64 for k in keys]
    assert firsts == [*np.cumsum([0, *units]).tolist(), sum(units)]
    assert sum(end - begin for begin, end, *_ in ranges) == 2 * sum(units)
