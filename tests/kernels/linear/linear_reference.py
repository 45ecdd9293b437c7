"""Linears in fp64, and the store's packed layouts packed value by value from ARCHITECTURE.md's text."""

from __future__ import annotations

import numpy as np

TO_BITS = {"float16": lambda a: a.astype(np.float16).view(np.uint16), "bfloat16": lambda a: bf16_bits(a)}


def bf16_bits(a: np.ndarray) -> np.ndarray:
    """fp32 values that bf16 holds exactly -> their bits."""
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def round_to(a: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values (truncated for bf16) that `dtype` holds, as fp32."""
    a = np.ascontiguousarray(a, dtype=np.float32)
    if dtype == "float16":
        return a.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (a.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return a


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] -> uint8 [Np/64, Kp/64, 4, 32, 16], one nibble at a time."""
    n, k = codes.shape
    tiles_n, tiles_k = -(-n // 64), -(-k // 64)
    packed = np.zeros((tiles_n, tiles_k, 4, 32, 16), np.uint8)
    for bn, bk, s, lane, j in np.ndindex(tiles_n, tiles_k, 4, 32, 4):
        g, t = lane // 4, lane % 4
        r, k0 = 64 * bn + 16 * s + g, 64 * bk + 16 * j
        nibbles = [
            (r + 8 * (i % 2), k0 + 2 * t + column) for i, column in enumerate((0, 0, 8, 8, 1, 1, 9, 9))
        ]
        for i, (row, column) in enumerate(nibbles):
            if row < n and column < k:
                packed[bn, bk, s, lane, 4 * j + i // 2] |= codes[row, column] << (4 * (i % 2))
    return packed


def pack_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] -> uint8 [Np/64, Kp/64, 4, 8, 2, 64], one at a time."""
    n, k = codes.shape
    packed = np.zeros((-(-n // 64), -(-k // 64), 4, 8, 2, 64), np.uint8)
    for row, column in np.ndindex(n, k):
        (bn, r), (bk, c) = divmod(row, 64), divmod(column, 64)
        (s, inside), (j, rest) = divmod(r, 16), divmod(c, 16)
        t, u, v = rest % 8 // 2, rest // 8, rest % 2
        packed[bn, bk, s, inside % 8, inside // 8, 16 * t + 4 * j + 2 * v + u] = codes[row, column]
    return packed


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """x [M, K] rounded to one byte or two, each 64 columns of a row with a scale of their own.

    In fp32, as the engine does: a number half-way between two codes must fall on the same side.
    """
    rows, k = x.shape
    blocks = np.pad(x.astype(np.float32), ((0, 0), (0, -k % 64))).reshape(rows, -1, 64)
    largest = np.abs(blocks).max(2, keepdims=True)
    top = np.float32(127 if bits == 8 else 127 * 256)
    codes = np.rint(blocks * (top / np.where(largest, largest, np.float32(1))))
    return (codes * (largest / top).astype(np.float64)).reshape(rows, -1)[:, :k]


def pack_params(values: np.ndarray, groups: int) -> np.ndarray:
    """Scales or zeros [N, G] -> [Np/64, groups, 64] in pair order."""
    n = values.shape[0]
    tiles = -(-n // 64)
    packed = np.zeros((tiles, groups, 64), values.dtype)
    for row, group in np.ndindex(values.shape):
        tile, place = divmod(row, 64)
        sub, inside = divmod(place, 16)
        packed[tile, group, 16 * sub + 2 * (inside % 8) + inside // 8] = values[row, group]
    return packed


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [M, K] w [N, K] transposed, in fp64."""
    return x.astype(np.float64) @ w.astype(np.float64).T
