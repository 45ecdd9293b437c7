from __future__ import annotations

import numpy as np
import pytest
import tolerance

from turbomill._core import kernels

# query heads : KV heads of the models, head dims that are and are not powers of two
HEADS = [(4, 4, 64), (9, 3, 64), (8, 1, 128), (4, 2, 80), (3, 3, 96)]
# (tokens, context): whole prompts, chunks over block borders, decodes
SPANS = [(1, 0), (15, 0), (65, 0), (130, 0), (64, 63), (65, 64), (129, 100), (200, 199)]


def reference(
    qkv: np.ndarray,
    nq: int,
    nkv: int,
    d: int,
    context: int,
    window: int = 0,
    softcap: float = 0.0,
    scale=None,
) -> np.ndarray:
    """Causal attention of the rows after `context`, in fp64, one head and query at a time."""
    t = len(qkv)
    wide = qkv.astype(np.float64)
    q = wide[:, : nq * d].reshape(t, nq, d)
    k = wide[:, nq * d : (nq + nkv) * d].reshape(t, nkv, d)
    v = wide[:, (nq + nkv) * d :].reshape(t, nkv, d)
    out = np.zeros((t - context, nq, d))
    for row in range(context, t):
        for head in range(nq):
            seen = slice(max(0, row + 1 - window) if window else 0, row + 1)
            scores = k[seen, head // (nq // nkv)] @ q[row, head] * (scale or d**-0.5)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            p = np.exp(scores - scores.max())
            out[row - context, head] = (p / p.sum()) @ v[seen, head // (nq // nkv)]
    return out.reshape(t - context, nq * d)


def case(tokens: int, nq: int, nkv: int, d: int) -> np.ndarray:
    rng = np.random.default_rng(tokens * 100 + nq)
    return rng.standard_normal((tokens, (nq + 2 * nkv) * d)).astype(np.float32) * 2


@pytest.mark.parametrize(("nq", "nkv", "d"), HEADS)
def test_fp32_cache(nq: int, nkv: int, d: int, isa: str) -> None:
    for tokens, context in SPANS:
        qkv = case(tokens, nq, nkv, d)
        out = kernels.attention(qkv, nq, nkv, d, context, isa=isa, threads=2)
        tolerance.assert_close(out, reference(qkv, nq, nkv, d, context), "float32")


@pytest.mark.parametrize("block_len", [8, 16, 128])
def test_block_length_does_not_matter(block_len: int, isa: str) -> None:
    qkv = case(130, 9, 3, 64)
    out = kernels.attention(qkv, 9, 3, 64, 40, block_len=block_len, isa=isa)
    tolerance.assert_close(out, reference(qkv, 9, 3, 64, 40), "float32")


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16"])
def test_half_caches_round_keys_and_values_only(cache_dtype: str, isa: str) -> None:
    qkv = case(70, 4, 2, 64)
    kv = np.ascontiguousarray(qkv[:, 4 * 64 :])
    if cache_dtype == "float16":
        rounded = kv.astype(np.float16).astype(np.float32)
    else:
        bits = kv.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    stored = np.concatenate([qkv[:, : 4 * 64], rounded], 1)
    out = kernels.attention(qkv, 4, 2, 64, 10, cache_dtype=cache_dtype, isa=isa)
    tolerance.assert_close(out, reference(stored, 4, 2, 64, 10), "float32")


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize(("policy", "k", "v"), [(8, 8, 8), (4, 4, 4), (84, 8, 4), (16, 16, 16), (17, 17, 17)])
@pytest.mark.parametrize(("nq", "nkv", "d"), [(9, 3, 64), (4, 2, 80), (2, 1, 192)])
def test_quantized_cache_is_attention_over_what_it_stored(
    nq: int, nkv: int, d: int, policy: int, k: int, v: int, rotation: bool, isa: str
) -> None:
    qkv = case(130, nq, nkv, d)

    def stored(heads: np.ndarray, policy: int) -> np.ndarray:
        rows = np.ascontiguousarray(heads.reshape(-1, d))
        rows = kernels.hadamard(rows, isa) if rotation else rows
        rows = kernels.kv_roundtrip(rows, policy, isa)[2]
        return (kernels.hadamard(rows, isa) if rotation else rows).reshape(130, -1)

    q, keys, values = np.split(qkv, [nq * d, (nq + nkv) * d], 1)
    for context in (65, 129):
        out = kernels.attention(qkv, nq, nkv, d, context, quant_policy=policy, isa=isa, rotation=rotation)
        expected = reference(np.concatenate([q, stored(keys, k), stored(values, v)], 1), nq, nkv, d, context)
        tolerance.assert_close(out, expected, "float32")


@pytest.mark.parametrize(("nq", "nkv", "d"), [*HEADS, (2, 1, 192), (4, 2, 24)])
def test_rotation_changes_nothing_but_rounding(nq: int, nkv: int, d: int, isa: str) -> None:
    for tokens, context in SPANS:
        qkv = case(tokens, nq, nkv, d)
        out = kernels.attention(qkv, nq, nkv, d, context, isa=isa, rotation=True)
        tolerance.assert_close(out, reference(qkv, nq, nkv, d, context), "float32")


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 500])
def test_window(window: int, isa: str) -> None:
    for nq, nkv, d in ((4, 4, 64), (8, 1, 80)):  # through the small-batch kernels and through BLAS
        for tokens, context in SPANS:
            qkv = case(tokens, nq, nkv, d)
            out = kernels.attention(qkv, nq, nkv, d, context, block_len=16, isa=isa, window=window)
            tolerance.assert_close(out, reference(qkv, nq, nkv, d, context, window), "float32")


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_and_scale(softcap: float, isa: str) -> None:
    qkv = case(130, 9, 3, 64)
    for context in (0, 129):
        out = kernels.attention(qkv, 9, 3, 64, context, isa=isa, window=70, softcap=softcap, scale=0.3)
        tolerance.assert_close(out, reference(qkv, 9, 3, 64, context, 70, softcap, 0.3), "float32")
