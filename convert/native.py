"""The native module's repacking, which a checkout without a build does without: slower, the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@cache
def _repack() -> Any:
    try:
        return import_module("turbomill._core").repack  # by name: the package itself imports more
    except ImportError:
        return None


def available() -> bool:
    """Whether the native module is built."""
    return _repack() is not None


def pack_w4(parts: Sequence[Tensor], block: int = 0) -> Tensor:
    """Of fuse.join(parts, 1, block), uint8 [K, N], which is never made: uint8 [ceil(N/64), ceil(K/64), 4, 32,
    16], as layout.pack_w4."""
    return torch.from_numpy(_repack().pack_w4([part.contiguous().numpy() for part in parts], block))


def pack_words(
    packing: str, parts: Sequence[Tensor], k: int, block: int, first: int, out: memoryview
) -> None:
    """pack_w4 of the codes that int32 words hold ("awq" [K, N/8], "kn" [K/8, N] or "nk" [N, K/8]), which are
    never made: rows of tiles from `first` on, as many as the bytes `out` hold. K, every N and the block are
    multiples of 8."""
    _repack().pack_words(packing, [part.contiguous().numpy() for part in parts], k, block, first, out)


def unpack_w4(packed: Tensor, k: int, n: int) -> Tensor:
    """The inverse."""
    return torch.from_numpy(_repack().unpack_w4(packed.contiguous().numpy(), k, n))


def pack_w8(codes: Tensor) -> Tensor:
    """uint8 [K, N] -> uint8 [ceil(N/64), ceil(K/64), 4, 8, 2, 64], as layout.pack_w8."""
    return torch.from_numpy(_repack().pack_w8(codes.contiguous().numpy()))


def unpack_w8(packed: Tensor, k: int, n: int) -> Tensor:
    """The inverse."""
    return torch.from_numpy(_repack().unpack_w8(packed.contiguous().numpy(), k, n))


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [R, N/8] -> uint8 [R, N], as formats.awq.unpack_words."""
    return torch.from_numpy(_repack().unpack_awq(words.contiguous().numpy()))


def unpack_nibbles(words: Tensor, k: int) -> Tensor:
    """int32 [ceil(K/8), N] -> uint8 [K, N], as formats.bits.unpack_bits of 4 bits."""
    return torch.from_numpy(_repack().unpack_nibbles(words.contiguous().numpy(), k))
