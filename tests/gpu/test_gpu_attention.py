from __future__ import annotations

import gpu_tolerance
import numpy as np
import pytest
from attention_reference import attend, reference, stored_rows

from turbomill import _core

HEADS = [
    (4, 4, 64),
    (9, 3, 64),
    (8, 1, 128),
    (4, 2, 80),
    (3, 3, 96),
    (32, 8, 128),
    (20, 1, 64),
    (16, 1, 64),
    (12, 1, 128),
    (4, 2, 24),
    (2, 1, 256),
    (2, 2, 192),
    (7, 1, 128),
]
# (tokens, context, chunk): whole prompts, chunks over block borders, decodes
SPANS = [
    (1, 0, 999),
    (15, 0, 999),
    (65, 0, 999),
    (130, 0, 64),
    (64, 63, 1),
    (65, 64, 1),
    (129, 100, 29),
    (300, 256, 40),
    (450, 130, 300),
    (700, 697, 1),
    (133, 125, 4),
    (141, 125, 1),
]


def case(tokens: int, nq: int, nkv: int, d: int, dtype: str) -> np.ndarray:
    values = np.random.default_rng().standard_normal((tokens, (nq + 2 * nkv) * d)) * 1.5
    return gpu_tolerance.rounded(values, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), HEADS)
def test_plain_cache(nq: int, nkv: int, d: int, dtype: str) -> None:
    for tokens, context, chunk in SPANS:
        qkv = case(tokens, nq, nkv, d, dtype)
        out = attend(qkv, nq, nkv, d, context, dtype, chunk=chunk)
        gpu_tolerance.assert_close(out, reference(qkv, nq, nkv, d, context), gpu_tolerance.ATTENTION[dtype])


@pytest.mark.parametrize("block_len", [8, 16, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_block_length_does_not_matter(block_len: int, dtype: str) -> None:
    qkv = case(200, 9, 3, 64, dtype)
    for context, chunk in ((40, 160), (199, 1)):
        out = attend(qkv, 9, 3, 64, context, dtype, block_len=block_len, chunk=chunk)
        gpu_tolerance.assert_close(out, reference(qkv, 9, 3, 64, context), gpu_tolerance.ATTENTION[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("d", [64, 80, 128])
def test_rotation(d: int, dtype: str) -> None:
    inv_freq = (10000.0 ** (-np.arange(0, d, 2) / d)).astype(np.float32)
    qkv = case(150, 4, 2, d, dtype)
    # Rotated queries and keys are rounded to the format once more. The inputs are random: one case in float16
    # lay at 1.02e-3.
    bound = {"float32": 1e-5, "float16": 1.25e-3, "bfloat16": 8e-3}[dtype]
    for context, chunk in ((0, 999), (149, 1)):
        out = attend(qkv, 4, 2, d, context, dtype, inv_freq=inv_freq.tolist(), chunk=chunk)
        gpu_tolerance.assert_close(out, reference(qkv, 4, 2, d, context, inv_freq), bound)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("nq", "nkv", "d"),
    [
        (9, 3, 64),
        (32, 8, 128),
        (16, 1, 64),
        (12, 1, 128),
        (4, 2, 80),
        (3, 3, 96),
        (4, 2, 24),
        (2, 1, 256),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_cache_is_attention_over_what_it_stored(
    bits: int, nq: int, nkv: int, d: int, dtype: str
) -> None:
    for tokens, context, chunk in SPANS:
        qkv = case(tokens, nq, nkv, d, dtype)
        expected = stored_rows(qkv, nq, d, bits)
        options = {"quant_policy": bits, "cache_dtype": "float16", "chunk": chunk}
        out = attend(qkv, nq, nkv, d, context, dtype, **options)
        gpu_tolerance.assert_close(
            out, reference(expected, nq, nkv, d, context), gpu_tolerance.ATTENTION_QUANTIZED[dtype]
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_of_another_type_than_activations(dtype: str) -> None:
    other = {"float16": "bfloat16", "bfloat16": "float16"}[dtype]
    for cache_dtype in (other, "float32"):
        qkv = gpu_tolerance.rounded(case(130, 8, 2, 64, dtype), other)
        qkv = gpu_tolerance.rounded(qkv, dtype)  # few values are left that one holds and the other does not
        kept = gpu_tolerance.rounded(qkv, cache_dtype)
        for context, chunk in ((0, 999), (129, 1)):
            out = attend(qkv, 8, 2, 64, context, dtype, cache_dtype=cache_dtype, chunk=chunk)
            expected = reference(np.concatenate([qkv[:, : 8 * 64], kept[:, 8 * 64 :]], 1), 8, 2, 64, context)
            gpu_tolerance.assert_close(out, expected, gpu_tolerance.ATTENTION[dtype])


# Tokens of a batch's sequences, and how many of them are new: one long beside many short, all alike, borders
# of the units of 64 keys, several new tokens, prompts beside decodes.
BATCHES = {
    "uneven": ([1900, 1, 3, 64, 65, 700, 129, 2], [1] * 8),
    "even": ([256] * 9, [1] * 9),
    "alone": ([1500], [1]),
    "many": ([1 + 37 * i for i in range(19)], [1] * 19),
    "borders": ([63, 64, 65, 127, 128, 129, 191, 192, 193], [1] * 9),
    "several": ([300, 70, 41, 5], [4, 2, 1, 3]),
    "mixed": ([500, 90, 400, 33], [1, 90, 1, 20]),
    "prompts": ([128, 513, 255, 40, 129], [128, 257, 255, 40, 1]),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(32, 8, 128), (8, 2, 64), (16, 1, 128)])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_sequences_of_a_batch_do_not_meet(
    name: str, bits: int, nq: int, nkv: int, d: int, dtype: str
) -> None:
    """Ranges of keys that blocks take end within sequences, and their parts are merged."""
    tokens, lengths = BATCHES[name]
    qkvs = [case(t, nq, nkv, d, dtype) for t in tokens]
    out = _core.kernels_cuda.attention_batch(
        qkvs, lengths, nq, nkv, d, quant_policy=0 if bits == 16 else bits, cache_dtype=dtype, dtype=dtype
    )
    bound = (gpu_tolerance.ATTENTION if bits == 16 else gpu_tolerance.ATTENTION_QUANTIZED)[dtype]
    row = 0
    for qkv, length in zip(qkvs, lengths, strict=True):
        if bits < 16:
            qkv = stored_rows(qkv, nq, d, bits)
        expected = reference(qkv, nq, nkv, d, len(qkv) - length)
        gpu_tolerance.assert_close(out[row : row + length], expected, bound)
        row += length


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1e-3), (1, 30), (1e-2, 1), (20, 1)])
def test_quantized_sizes(key_size: float, value_size: float, bits: int, dtype: str) -> None:
    """Values far from 1 keep their precision, and scores far from 0 their order."""
    nq, nkv, d, tokens = 8, 2, 128, 400
    qkv = case(tokens, nq, nkv, d, dtype).reshape(tokens, nq + 2 * nkv, d)
    qkv[:, nq : nq + nkv] *= key_size
    qkv[:, nq + nkv :] *= value_size * np.exp2(np.random.default_rng().integers(-6, 7, (tokens, 1, 1)))
    qkv = gpu_tolerance.rounded(qkv.reshape(tokens, -1), dtype)
    expected = stored_rows(qkv, nq, d, bits)
    out = attend(qkv, nq, nkv, d, tokens - 1, dtype, quant_policy=bits, cache_dtype="float16")
    gpu_tolerance.assert_close(
        out, reference(expected, nq, nkv, d, tokens - 1), gpu_tolerance.ATTENTION_QUANTIZED[dtype]
    )


def test_attention_gives_the_same_bits_every_time() -> None:
    """Parts of a sequence are merged in order, whichever block arrives last."""
    tokens, lengths = BATCHES["uneven"]
    qkvs = [case(t, 32, 8, 128, "float16") for t in tokens]
    runs = [
        _core.kernels_cuda.attention_batch(
            qkvs, lengths, 32, 8, 128, quant_policy=8, cache_dtype="float16", dtype="float16"
        )
        for _ in range(4)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("nkv", [1, 2, 8])
def test_ranges_cover_every_key_once(nkv: int, bits: int) -> None:
    """Blocks and the merges of their parts, as the kernel derives them from what the host cut."""
    rng = np.random.default_rng()
    for count in (1, 2, 16, 64, 300):
        keys = rng.integers(1, rng.choice([200, 3000, 30000]), count).tolist()
        firsts, ranges = _core.kernels_cuda.decode_ranges(keys, 4 * nkv, nkv, bits % 16, 132, padding=3)
        units = firsts[-1]
        assert units == sum(-(-k // 64) for k in keys)
        seen = np.zeros(units * nkv, int)
        arrived: dict[int, list[int]] = {}
        for block, (begin, end, head, entry, pair_begin, pair_end, share, first, parts) in enumerate(ranges):
            at = begin
            while at < end:
                assert pair_begin == head * units + firsts[entry] <= at
                assert pair_end == head * units + firsts[entry + 1]
                until = min(end, pair_end)
                seen[at:until] += 1
                if at > pair_begin or until < pair_end:
                    of = (pair_begin // share, -(-pair_end // share)) if share else (first, first + parts)
                    assert of[0] <= block < of[1] <= of[0] + 130
                    assert (block == of[0]) == (at == pair_begin)
                    arrived.setdefault(pair_begin, [of[1] - of[0]]).append(block)
                at = pair_begin = until
                while at < end and pair_end == pair_begin:
                    head, entry = (head, entry + 1) if entry + 2 < len(firsts) else (head + 1, 0)
                    pair_end = pair_begin + firsts[entry + 1] - firsts[entry]
        assert (seen == 1).all()
        assert all(len(set(blocks)) == parts for parts, *blocks in arrived.values())
        longest = max(end - begin for begin, end, *_ in ranges)
        assert longest <= max(8, 1.1 * len(seen) / len(ranges) + 3, units / 128 + 2)
