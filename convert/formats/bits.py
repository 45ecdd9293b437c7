"""Streams of b-bit values in 32-bit words, low bits first; a value may straddle two words."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from turbomill.convert import native


def words_for(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` values."""
    return -(-count * bits // 32)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [M, ...] along dim 0 into int32 [ceil(M * bits / 32), ...]; unused bits are zero."""
    if 8 % bits == 0 and codes.shape[0] * bits % 32 == 0:
        return _pack_bytes(codes, bits)
    period = 32 // gcd(32, bits)  # values after which the pattern of words repeats
    per_period = period * bits // 32  # words
    count, rest = codes.shape[0], codes.shape[1:]
    periods = -(-count // period)
    words = torch.zeros((periods, per_period, *rest), dtype=torch.int64)
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        values = codes[i::period].long()  # [<= periods, ...]
        have = values.shape[0]
        words[:have, word] |= (values << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[:have, word + 1] |= values >> (32 - shift)
    packed = words.reshape(periods * per_period, *rest)[: words_for(count, bits)]
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """The same where no value straddles a byte: byte by byte, several times faster."""
    per_byte = 8 // bits
    per_word = 4 * per_byte
    planes = []
    for byte in range(4):
        plane = codes[byte * per_byte :: per_word].clone()  # [M * bits / 32, ...]
        for i in range(1, per_byte):
            plane |= codes[byte * per_byte + i :: per_word] << (i * bits)
        planes.append(plane)
    return torch.stack(planes, dim=-1).view(torch.int32).squeeze(-1)  # little-endian, as the formats are


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` values along dim 0 of int32 words [W, ...], as uint8 [count, ...]."""
    if bits == 4 and words.dim() == 2 and words.shape[0] == words_for(count, bits) and native.available():
        return native.unpack_nibbles(words, count)
    period = 32 // gcd(32, bits)
    per_period = period * bits // 32
    rest = words.shape[1:]
    mask = 2**bits - 1
    codes = torch.empty((count, *rest), dtype=torch.uint8)
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        have = codes[i::period].shape[0]
        if have == 0:
            break
        low = words[word::per_period][:have].long() & 0xFFFFFFFF
        values = low >> shift
        if shift + bits > 32:
            values |= (words[word + 1 :: per_period][:have].long() & 0xFFFFFFFF) << (32 - shift)
        codes[i::period] = (values & mask).to(torch.uint8)
    return codes
