"""Single kernels: packed linears and attention, timed by CUDA-graph replays over data that no cache holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from turbomill import _core

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
DECODES = ((1, 4096), (16, 4096), (64, 4096), (256, 1024))
# quant_policy, rotation, bytes of K and V of a token and head of 128
SCHEMES = (
    (0, False, 512),
    (8, False, 264),
    (4, False, 136),
    (4, True, 136),
    (84, False, 200),
    (84, True, 200),
    (16, False, 264),
    (17, False, 264),
)
SIDES = {84: (8, 4)}  # policies whose keys and values differ
BANDWIDTH, FLOPS = 4.25e12, 790e12


def check_linear(dtype: str) -> float:
    """Relative error of a 4-bit linear against fp64, at each number of rows that is timed."""
    rng = np.random.default_rng()
    n, k, group, worst = 192, 1024, 128, 0.0
    codes = rng.integers(0, 256, (n // 64, k // 64, 4, 32, 16), np.uint8)
    # Lane 4g + t, byte 4j + 2v + u: rows g (low) and g + 8 (high) of column 16 j + 8 u + 2 t + v.
    split = codes.reshape(n // 64, k // 64, 4, 8, 4, 4, 2, 2)  # [bn, bk, s, g, t, j, v, u]
    rows = np.stack([split & 15, split >> 4], 0).transpose(1, 3, 0, 4, 2, 6, 8, 5, 7)
    w = rows.reshape(n, k).astype(np.float64) - 8
    scales = np.full((n // 64, k // group, 64), 2.0**-6)
    bits = (scales.astype(np.float16) if dtype == "float16" else scales.astype(np.float32)).view(np.uint16)
    stored = bits if dtype == "float16" else np.ascontiguousarray(bits.reshape(*scales.shape, 2)[..., 1])
    for m in (*ROWS[:7], 300):
        x = rng.integers(-64, 65, (m, k)).astype(np.float32) / 64  # exact in both types
        y = _core.kernels_cuda.w4_linear(
            x, codes, stored, None, n, k, dtype=dtype, scale_dtype=dtype, out_dtype="float32"
        )
        expected = x @ w.T * 2.0**-6
        worst = max(worst, float(np.linalg.norm(y - expected) / np.linalg.norm(expected)))
    if worst > 1e-5:
        raise RuntimeError(f"the {dtype} 4-bit linear is off by {worst:.1e}: its speed means nothing")
    return worst


def check_bytes(dtype: str) -> float:
    """The same of an 8-bit linear; beyond 16 rows its weights, exact in both types here, are rounded."""
    rng = np.random.default_rng()
    n, k, group, worst = 192, 1024, 128, 0.0
    codes = rng.integers(0, 256, (n // 64, k // 64, 4, 8, 2, 64), np.uint8)
    # Row 64 bn + 16 s + 8 h + g, byte 16 t + 4 j + 2 v + u of a tile: column 16 j + 8 u + 2 t + v.
    split = codes.reshape(n // 64, k // 64, 4, 8, 2, 4, 4, 2, 2)  # [bn, bk, s, g, h, t, j, v, u]
    w = split.transpose(0, 2, 4, 3, 1, 6, 8, 5, 7).reshape(n, k).astype(np.float64) - 128
    scales = np.full((n // 64, k // group, 64), 2.0**-10, np.float32)
    stored = (
        scales.astype(np.float16).view(np.uint16)
        if dtype == "float16"
        else (scales.view(np.uint32) >> 16).astype(np.uint16)
    )
    for m in ROWS[:8]:
        x = rng.integers(-64, 65, (m, k)).astype(np.float32) / 64
        y = _core.kernels_cuda.w8_linear(
            x, codes, stored, None, None, n, k, dtype=dtype, scale_dtype=dtype, out_dtype="float32"
        )
        expected = x @ w.T * 2.0**-10
        worst = max(worst, float(np.linalg.norm(y - expected) / np.linalg.norm(expected)))
    if worst > 1e-5:
        raise RuntimeError(f"the {dtype} 8-bit linear is off by {worst:.1e}: its speed means nothing")
    return worst


def check_dense(dtype: str) -> float:
    """The same of a dense linear."""
    rng = np.random.default_rng()
    worst = 0.0
    for n in (192, 17000):
        w = rng.integers(-64, 65, (n, 1024)).astype(np.float32) / 64
        for m in ROWS[:7]:
            x = rng.integers(-64, 65, (m, 1024)).astype(np.float32) / 64
            y = _core.kernels_cuda.dense_linear(x, w, dtype=dtype, out_dtype="float32")
            expected = x @ w.T
            worst = max(worst, float(np.linalg.norm(y - expected) / np.linalg.norm(expected)))
    if worst > 1e-5:
        raise RuntimeError(f"the {dtype} dense linear is off by {worst:.1e}: its speed means nothing")
    return worst


CHECKS = {4: check_linear, 8: check_bytes, 16: check_dense}


def linears(dtype: str, repeats: int, overlap: bool = False, bits: int = 4) -> list[dict[str, Any]]:
    """Microseconds of linears of 4, 8 (groups of 128) or 16 bits, of the packed ones with their plan.

    As [{"N", "K", "M", "us", "floor_us", "plan"}].
    `overlap`: by programmatic dependent launch, a kernel's weights begin to arrive while the one before ends.
    """
    CHECKS[bits](dtype)
    rows = []
    for m in ROWS:
        for n, k in SHAPES:
            us = _core.kernels_cuda.bench_linear(
                n, k, m, 128, dtype, overlap=overlap, repeats=repeats, bits=bits
            )
            params = n * k / 64 if bits < 16 else 0
            moved = n * k * bits / 8 + params + 2 * m * (n + k)
            floor = max(moved / BANDWIDTH, 2.0 * m * n * k / FLOPS) * 1e6
            entry = {"N": n, "K": k, "M": m, "us": round(us, 2), "floor_us": round(floor, 2)}
            plan = {"plan": _core.kernels_cuda.fused_plan(bits, n, k, m, overlap)} if bits < 16 else {}
            rows.append(entry | plan)
    return rows


def check_decodes(dtype: str) -> float:
    """Relative error of decode attention in each format that is timed, against fp64 on the cached values."""
    rng = np.random.default_rng()
    heads, kv_heads, dim, lengths, worst = 32, 8, 128, (700, 3, 129, 64), 0.0
    # Multiples of 1/16 below 4: exact in every type.
    qkvs = [
        (rng.integers(-63, 64, (t, (heads + 2 * kv_heads) * dim)) / 16).astype(np.float32) for t in lengths
    ]
    for policy, rotation, _ in SCHEMES:
        out = _core.kernels_cuda.attention_batch(
            qkvs,
            [1] * len(lengths),
            heads,
            kv_heads,
            dim,
            quant_policy=policy,
            cache_dtype=dtype,
            dtype=dtype,
            rotation=rotation,
        )
        for row, qkv in zip(out, qkvs, strict=True):
            q, k, v = np.split(qkv.reshape(len(qkv), -1, dim), [heads, heads + kv_heads], 1)
            k_policy, v_policy = SIDES.get(policy, (policy, policy))
            k, v = _stored(k, k_policy, rotation), _stored(v, v_policy, rotation)
            k, v = (x.repeat(heads // kv_heads, 1).astype(np.float64) for x in (k, v))
            scores = np.einsum("hd,thd->ht", q[-1], k) / np.sqrt(dim)
            p = np.exp(scores - scores.max(1, keepdims=True))
            expected = np.einsum("ht,thd->hd", p / p.sum(1, keepdims=True), v).ravel()
            worst = max(worst, float(np.linalg.norm(row - expected) / np.linalg.norm(expected)))
    if not worst < {"float16": 2e-3, "bfloat16": 1.6e-2}[dtype]:
        raise RuntimeError(f"{dtype} decode attention is off by {worst:.1e}: its speed means nothing")
    return worst


def _stored(x: np.ndarray, policy: int, rotation: bool) -> np.ndarray:
    """What a cache gives back for heads [..., D], by the CPU backend."""
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    rows = _core.kernels.hadamard(rows) if rotation else rows
    rows = _core.kernels.kv_roundtrip(rows, policy)[2] if policy else rows
    return (_core.kernels.hadamard(rows) if rotation else rows).reshape(x.shape)


def decodes(dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of one layer's decode attention, 32 query and 8 KV heads of 128.

    Up to 16 sequences, attention also rotates and caches the new tokens, as in an engine.
    """
    check_decodes(dtype)
    rows = []
    for policy, rotation, row_bytes in SCHEMES:
        for batch, context in DECODES:
            us = _core.kernels_cuda.bench_attention(
                batch,
                context - 1,
                1,
                32,
                8,
                128,
                quant_policy=policy,
                dtype=dtype,
                rotation=rotation,
                repeats=repeats,
            )
            floor = batch * context * 8 * row_bytes / BANDWIDTH * 1e6
            entry = {"quant_policy": policy, "rotation": rotation, "batch": batch, "context": context}
            rows.append(entry | {"us": round(us, 1), "floor_us": round(floor, 1)})
    return rows


def prompts(dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of one layer's attention over a whole prompt of 4096 tokens."""
    rows = []
    for policy, rotation in ((0, False), (8, False), (4, False), (4, True)):
        us = _core.kernels_cuda.bench_attention(
            1, 0, 4096, 32, 8, 128, quant_policy=policy, dtype=dtype, rotation=rotation, repeats=repeats
        )
        floor = 4 * 32 * 128 * 4096 * 4097 / 2 / FLOPS * 1e6
        entry = {"quant_policy": policy, "rotation": rotation, "tokens": 4096}
        rows.append(entry | {"us": round(us, 1), "floor_us": round(floor, 1)})
    return rows


EXPERT_ROWS = (1, 8, 32, 128, 512, 4096)
# Hidden size, expert's intermediate size, experts, experts of a token.
MIXTURES = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "Mixtral 8x7B": (4096, 14336, 8, 2)}


def experts(dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of one layer's experts, routing and the weighted sum included.

    The floor: the weights of the experts that are used, in the mean, or the products.
    """
    rows = []
    for name, (hidden, inter, count, top) in MIXTURES.items():
        for group in (128, 0):
            times = _core.kernels_cuda.bench_moe(
                hidden, inter, count, top, EXPERT_ROWS, group, dtype, repeats=repeats
            )
            weight_bytes = 3 * hidden * inter * (0.5 + 2 / group if group else 2.0)
            for m, us in zip(EXPERT_ROWS, times, strict=True):
                used = count * (1 - (1 - top / count) ** m)
                floor = max(used * weight_bytes / BANDWIDTH, 6 * hidden * inter * top * m / FLOPS) * 1e6
                entry = {"model": name, "weights": f"W4 g{group}" if group else "16 bits", "M": m}
                rows.append(entry | {"us": round(us, 1), "floor_us": round(floor, 1)})
    return rows
