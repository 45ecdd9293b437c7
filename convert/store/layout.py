"""The byte orders of the store's tensors (FORMAT.md): 64 x 64 tiles of codes, scales in pair order.

Np and Kp are N and K rounded up to whole tiles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turbomill.convert import native

VECTOR, DENSE, W4, W8, GROUP = "vector", "dense.nk", "w4.n64k64", "w8.n64k64", "group.n64"
PACKED = {4: W4, 8: W8}  # bits of a code as stored -> layout
BITS = {layout: bits for bits, layout in PACKED.items()}
TILE = 64


def padded(size: int) -> int:
    """`size` rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def stored_group(group: int, k: int) -> int:
    """The group of the stored scales: it divides Kp, and `group` unless one group spans all of K."""
    return padded(k) if group >= k else math.gcd(group, padded(k))


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def tile_shape(bits: int) -> tuple[int, ...]:
    """How a tile of 64 x 64 codes of 4 or 8 bits is stored."""
    return (4, 32, 16) if bits == 4 else (4, 8, 2, 64)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [K, N] in the layout of `bits`."""
    return pack_w4(codes) if bits == 4 else pack_w8(codes)


def unpack_codes(packed: Tensor, bits: int, k: int, n: int) -> Tensor:
    """The inverse: uint8 codes [K, N] without padding."""
    return unpack_w4(packed, k, n) if bits == 4 else unpack_w8(packed, k, n)


def pack_w4(codes: Tensor) -> Tensor:
    """uint8 codes [K, N] -> uint8 [Np/64, Kp/64, 4, 32, 16], two codes to a byte; the padding is zero."""
    return native.pack_w4([codes]) if native.available() else plain_pack_w4(codes)


def plain_pack_w4(codes: Tensor) -> Tensor:
    """The same in PyTorch, which says where every bit goes."""
    k, n = codes.shape
    weight = _pad(codes, padded(k), padded(n)).T  # [Np, Kp]
    # row = 64 bn + 16 s + 8 h + g, column = 64 bk + 16 j + 8 u + 2 t + v
    tiles = weight.reshape(padded(n) // TILE, 4, 2, 8, padded(k) // TILE, 4, 2, 4, 2)  # bn s h g bk j u t v
    pairs = tiles[:, :, 0] | tiles[:, :, 1] << 4  # bn s g bk j u t v
    # lane = 4 g + t, byte = 4 j + 2 v + u
    ordered = pairs.permute(0, 3, 1, 2, 6, 4, 7, 5)  # bn bk s g t j v u
    return ordered.reshape(padded(n) // TILE, padded(k) // TILE, 4, 32, 16)


def unpack_w4(packed: Tensor, k: int, n: int) -> Tensor:
    """The inverse: uint8 codes [K, N] without padding."""
    return native.unpack_w4(packed, k, n) if native.available() else plain_unpack_w4(packed, k, n)


def plain_unpack_w4(packed: Tensor, k: int, n: int) -> Tensor:
    """The same in PyTorch."""
    tiles_n, tiles_k = packed.shape[:2]
    pairs = packed.reshape(tiles_n, tiles_k, 4, 8, 4, 4, 2, 2)  # bn bk s g t j v u
    pairs = pairs.permute(0, 2, 3, 1, 5, 7, 4, 6)  # bn s g bk j u t v
    tiles = torch.stack((pairs & 15, pairs >> 4), dim=2)  # bn s h g bk j u t v
    return tiles.reshape(tiles_n * TILE, tiles_k * TILE)[:n, :k].T.contiguous()


def pack_w8(codes: Tensor) -> Tensor:
    """uint8 codes [K, N] -> uint8 [Np/64, Kp/64, 4, 8, 2, 64], a code to a byte; the padding is zero."""
    return native.pack_w8(codes) if native.available() else plain_pack_w8(codes)


def plain_pack_w8(codes: Tensor) -> Tensor:
    """The same in PyTorch."""
    k, n = codes.shape
    weight = _pad(codes, padded(k), padded(n)).T  # [Np, Kp]
    tiles = weight.reshape(padded(n) // TILE, 4, 2, 8, padded(k) // TILE, 4, 2, 4, 2)  # bn s h g bk j u t v
    ordered = tiles.permute(0, 4, 1, 3, 2, 7, 5, 8, 6)  # bn bk s g h t j v u
    return ordered.reshape(padded(n) // TILE, padded(k) // TILE, 4, 8, 2, TILE)


def unpack_w8(packed: Tensor, k: int, n: int) -> Tensor:
    """The inverse: uint8 codes [K, N] without padding."""
    return native.unpack_w8(packed, k, n) if native.available() else plain_unpack_w8(packed, k, n)


def plain_unpack_w8(packed: Tensor, k: int, n: int) -> Tensor:
    """The same in PyTorch."""
    tiles_n, tiles_k = packed.shape[:2]
    tiles = packed.reshape(tiles_n, tiles_k, 4, 8, 2, 4, 4, 2, 2)  # bn bk s g h t j v u
    tiles = tiles.permute(0, 2, 4, 3, 1, 6, 8, 5, 7)  # bn s h g bk j u t v
    return tiles.reshape(tiles_n * TILE, tiles_k * TILE)[:n, :k].T.contiguous()


def pack_groups(values: Tensor, group: int, k: int) -> Tensor:
    """Scales or zeros [G, N] of `group` rows each -> [Np/64, Kp/stored_group, 64], rows in pair order."""
    _, n = values.shape
    stored = stored_group(group, k)
    if group < k and group > stored:
        values = values.repeat_interleave(group // stored, dim=0)[: -(-k // stored)]
    groups = padded(k) // stored
    rows = _pad(values, groups, padded(n)).reshape(groups, padded(n) // TILE, 4, 2, 8)  # G bn s h g
    return rows.permute(1, 0, 2, 4, 3).reshape(padded(n) // TILE, groups, TILE)  # bn G (s g h)


def unpack_groups(packed: Tensor, group: int, k: int, n: int) -> Tensor:
    """The inverse: [ceil(K / group), N] in the stored group, without padding."""
    tiles_n, groups, _ = packed.shape
    rows = packed.reshape(tiles_n, groups, 4, 8, 2).permute(1, 0, 2, 4, 3)  # G bn s h g
    return rows.reshape(groups, tiles_n * TILE)[: -(-k // group), :n].contiguous()
