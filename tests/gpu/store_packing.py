"""The store's packed layouts by indexing, from FORMAT.md's text, fast enough for large weights."""

from __future__ import annotations

import numpy as np

# Column offsets, within 16, of nibble pairs (low: row g, high: row g + 8) of lane t: byte 2v + u.
_COLUMNS = np.array([[2 * t + v + 8 * u for v in (0, 1) for u in (0, 1)] for t in range(4)])  # [4, 4]


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] -> uint8 [Np/64, Kp/64, 4, 32, 16]."""
    n, k = codes.shape
    tiles_n, tiles_k = -(-n // 64), -(-k // 64)
    padded = np.zeros((tiles_n * 64, tiles_k * 64), np.uint8)
    padded[:n, :k] = codes
    # [bn, s, row half, g, bk, j, column]
    split = padded.reshape(tiles_n, 4, 2, 8, tiles_k, 4, 16)
    low, high = split[:, :, 0], split[:, :, 1]  # [bn, s, g, bk, j, column]
    both = (low | high << 4)[..., _COLUMNS]  # [bn, s, g, bk, j, t, byte]
    return np.ascontiguousarray(both.transpose(0, 3, 1, 2, 5, 4, 6)).reshape(tiles_n, tiles_k, 4, 32, 16)


def pack_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] of up to 8 bits -> uint8 [Np/64, Kp/64, 4, 8, 2, 64]."""
    n, k = codes.shape
    tiles_n, tiles_k = -(-n // 64), -(-k // 64)
    padded = np.zeros((tiles_n * 64, tiles_k * 64), np.uint8)
    padded[:n, :k] = codes
    # Row 64 bn + 16 s + 8 h + g, column 64 bk + 16 j + 8 u + 2 t + v.
    split = padded.reshape(tiles_n, 4, 2, 8, tiles_k, 4, 2, 4, 2)  # [bn, s, h, g, bk, j, u, t, v]
    return np.ascontiguousarray(split.transpose(0, 4, 1, 3, 2, 7, 5, 8, 6)).reshape(
        tiles_n, tiles_k, 4, 8, 2, 64
    )


def pack_params(values: np.ndarray) -> np.ndarray:
    """Scales or zeros [N, G] -> [Np/64, G, 64] in pair order."""
    n, groups = values.shape
    tiles = -(-n // 64)
    padded = np.zeros((tiles * 64, groups), values.dtype)
    padded[:n] = values
    split = padded.reshape(tiles, 4, 2, 8, groups)  # [bn, s, row half, g, G]
    return np.ascontiguousarray(split.transpose(0, 4, 1, 3, 2)).reshape(tiles, groups, 64)
