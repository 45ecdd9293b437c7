"""Causal attention in fp64, and what a quantized cache stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from turbomill import _core


def attend(
    qkv: np.ndarray, nq: int, nkv: int, d: int, context: int, dtype: str, **options: Any
) -> np.ndarray:
    """The GPU's attention, its cache of the same type as the activations unless `options` say otherwise."""
    return _core.kernels_cuda.attention(
        qkv, nq, nkv, d, context, **({"cache_dtype": dtype, "dtype": dtype} | options)
    )


def rotated(x: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """x [T, heads, D] with its first 2 * len(inv_freq) dimensions rotated by the positions 0 .. T - 1."""
    angle = np.arange(len(x))[:, None] * inv_freq.astype(np.float64)
    cos, sin, half = np.cos(angle)[:, None], np.sin(angle)[:, None], len(inv_freq)
    a, b = x[..., :half].copy(), x[..., half : 2 * half].copy()
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def normed_heads(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def reference(
    qkv: np.ndarray,
    nq: int,
    nkv: int,
    d: int,
    context: int,
    inv_freq: np.ndarray | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float = 0.0,
    q_norm: np.ndarray | None = None,
    k_norm: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of the rows after `context`, [T - context, Nq D], after norms and rotation of heads."""
    t, group = len(qkv), nq // nkv
    wide = qkv.astype(np.float64).reshape(t, nq + 2 * nkv, d)
    q, k, v = wide[:, :nq], wide[:, nq : nq + nkv], wide[:, nq + nkv :]
    if q_norm is not None and k_norm is not None:
        q, k = normed_heads(q, q_norm), normed_heads(k, k_norm)
    if inv_freq is not None:
        q, k = rotated(q, inv_freq), rotated(k, inv_freq)
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    scores = np.einsum("qhd,khd->hqk", q[context:], k) * (scale or d**-0.5)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    ahead = np.arange(context, t)[:, None] - np.arange(t)
    scores[:, (ahead < 0) | (ahead >= (window or t))] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(t - context, nq * d)


def stored(x: np.ndarray, bits: int) -> np.ndarray:
    """What a quantized cache gives back for heads [*, D]."""
    low, high = x.min(1), x.max(1)
    scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)[:, None]
    zero = low.astype(np.float16).astype(np.float32)[:, None]
    return (
        np.clip(np.floor((x - zero) * (np.float32(1) / scale) + np.float32(0.5)), 0, 2**bits - 1) * scale
        + zero
    )


def stored_rows(qkv: np.ndarray, nq: int, d: int, bits: int) -> np.ndarray:
    """qkv [T, (Nq + 2 Nkv) D] with keys and values as a quantized cache gives them back."""
    heads = np.ascontiguousarray(qkv[:, nq * d :].reshape(-1, d))
    return np.concatenate([qkv[:, : nq * d], stored(heads, bits).reshape(len(qkv), -1)], 1)
