"""The store's byte orders against a scalar reference written from ARCHITECTURE.md."""

import pytest
import torch

from turbomill.convert import native
from turbomill.convert.formats.awq import pack_words, unpack_words
from turbomill.convert.formats.bits import pack_bits, unpack_bits
from turbomill.convert.linear import DenseLinear, QuantScheme
from turbomill.convert.models.base import Fusion
from turbomill.convert.store.fuse import fuse, join, pack_joined, split
from turbomill.convert.store.layout import (
    pack_groups,
    pack_w4,
    padded,
    plain_pack_w4,
    plain_unpack_w4,
    stored_group,
    unpack_groups,
    unpack_w4,
)
from turbomill.errors import CheckpointError


def reference_w4(codes):
    """Word by word, nibble by nibble, as the text says it."""
    k, n = codes.shape
    tiles_n, tiles_k = -(-n // 64), -(-k // 64)
    out = torch.zeros(tiles_n, tiles_k, 4, 32, 16, dtype=torch.uint8)

    def w(row, column):
        return int(codes[column, row]) if row < n and column < k else 0

    for bn in range(tiles_n):
        for bk in range(tiles_k):
            for s in range(4):
                for lane in range(32):
                    g, t = lane // 4, lane % 4
                    r = 64 * bn + 16 * s + g
                    for j in range(4):
                        k0 = 64 * bk + 16 * j
                        nibbles = [
                            *(w(r, k0 + 2 * t), w(r + 8, k0 + 2 * t)),
                            *(w(r, k0 + 2 * t + 8), w(r + 8, k0 + 2 * t + 8)),
                            *(w(r, k0 + 2 * t + 1), w(r + 8, k0 + 2 * t + 1)),
                            *(w(r, k0 + 2 * t + 9), w(r + 8, k0 + 2 * t + 9)),
                        ]
                        word = sum(value << 4 * i for i, value in enumerate(nibbles))
                        for i, byte in enumerate(word.to_bytes(4, "little")):
                            out[bn, bk, s, lane, 4 * j + i] = byte
    return out


@pytest.mark.parametrize("k, n", [(64, 64), (15, 17), (63, 65), (65, 63), (128, 64), (96, 200)])
def test_w4_matches_the_reference(k, n):
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    packed = pack_w4(codes)
    assert torch.equal(packed, reference_w4(codes))
    assert torch.equal(unpack_w4(packed, k, n), codes)


def test_low_nibbles_of_64_bytes_are_one_row():
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    flat = pack_w4(codes).reshape(4, 8, 64)  # sub-tile, g, the four lanes' bytes
    for s in range(4):
        for g in range(8):
            assert sorted((flat[s, g] & 15).tolist()) == sorted(codes[:, 16 * s + g].tolist())
            assert sorted((flat[s, g] >> 4).tolist()) == sorted(codes[:, 16 * s + g + 8].tolist())


@pytest.mark.parametrize(
    "k, n, group", [(64, 64, 32), (128, 80, 64), (96, 33, 32), (192, 64, 128), (100, 70, 128)]
)
def test_groups_match_the_reference(k, n, group):
    values = torch.randn(-(-k // group), n).half()
    packed = pack_groups(values, group, k)
    stored = stored_group(group, k)
    assert padded(k) % stored == 0 and packed.shape == (padded(n) // 64, padded(k) // stored, 64)
    for bn in range(packed.shape[0]):
        for block in range(packed.shape[1]):
            for position in range(64):
                pair, half = divmod(position % 16, 2)
                row = 64 * bn + position // 16 * 16 + pair + 8 * half
                first = block * stored  # the first column of K this value scales
                inside = row < n and first < k
                assert packed[bn, block, position] == (values[first // group, row] if inside else 0)
    every_column = torch.arange(k)
    back = unpack_groups(packed, stored, k, n)
    assert torch.equal(back[every_column // stored], values[every_column // group])


@pytest.mark.parametrize("block, sizes", [(0, (24, 8, 16)), (8, (24, 24)), (8, (16, 16, 16))])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_join_and_split(block, sizes, dim):
    parts = [torch.randn(*((n, 5) if dim == 0 else (5, n))) for n in sizes]
    whole = join(parts, dim, block)
    rows = [part if dim == 0 else part.T for part in parts]
    expected = []
    if block:
        for first in range(0, sizes[0], block):
            for part in rows:
                expected += list(part[first : first + block])
    else:
        for part in rows:
            expected += list(part)
    assert torch.equal(whole if dim == 0 else whole.T, torch.stack(expected))
    assert all(torch.equal(a, b) for a, b in zip(split(whole, dim, block, sizes), parts, strict=True))


def test_fused_quantized_linear_is_the_interleaved_dense_one(make_linear):
    fusion = Fusion("w_gate_up", ("gate", "up"), interleave=8)
    gate, up = (make_linear(64, 48, QuantScheme(4, 32, False), bias=bias) for bias in (True, False))
    fused = fuse("x", fusion, [gate, up])
    dense = fuse("x", fusion, [DenseLinear(gate.dequantize(), gate.bias), DenseLinear(up.dequantize())])
    assert torch.equal(fused.dequantize(), dense.weight) and torch.equal(fused.bias, dense.bias)
    assert torch.equal(fused.dequantize()[8:16], up.dequantize()[:8])
    assert torch.equal(fused.bias[8:16], torch.zeros(8).half())


def test_parts_of_different_schemes_do_not_fuse(make_linear):
    a, b = make_linear(64, 48, QuantScheme(4, 32, False)), make_linear(64, 48, QuantScheme(4, 64, False))
    with pytest.raises(CheckpointError, match="quantized differently"):
        fuse("x", Fusion("w", ("a", "b")), [a, b])


@pytest.mark.parametrize(("k", "n"), [(64, 64), (1, 1), (130, 72), (200, 200), (576, 8), (63, 129)])
def test_the_native_module_repacks_to_the_same_bytes(k, n):
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    packed = plain_pack_w4(codes)
    assert torch.equal(native.pack_w4([codes]), packed)
    assert torch.equal(native.unpack_w4(packed, k, n), codes)
    assert torch.equal(plain_unpack_w4(packed, k, n), codes)
    words = pack_bits(codes, 4)
    assert torch.equal(native.unpack_nibbles(words, k), codes)
    if n % 8 == 0:
        assert torch.equal(native.unpack_awq(pack_words(codes)), codes)


@pytest.mark.parametrize(
    ("sizes", "block"),
    [((64, 128, 64), 0), ((40, 8, 56), 0), ((7, 70, 3), 0), ((64, 64), 8), ((40, 40), 8), ((24, 24, 24), 4)],
)
@pytest.mark.parametrize("k", [64, 130])
def test_codes_that_are_fused_meet_only_when_they_are_packed(sizes, block, k):
    parts = [torch.randint(0, 16, (k, n), dtype=torch.uint8) for n in sizes]
    assert torch.equal(pack_joined(parts, block, 4), plain_pack_w4(join(parts, 1, block)))


def test_parts_that_do_not_fit_together_are_refused():
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    for parts, block in (([], 0), ([codes, codes[:32]], 0), ([codes, codes[:, :32]], 8), ([codes] * 2, 7)):
        with pytest.raises(ValueError):
            native.pack_w4(parts, block)


def test_without_the_native_module_it_is_pytorch(monkeypatch):
    codes = torch.randint(0, 16, (96, 40), dtype=torch.uint8)
    expected = pack_w4(codes), unpack_words(pack_words(codes)), unpack_bits(pack_bits(codes, 4), 4, 96)
    monkeypatch.setattr(native, "available", lambda: False)
    found = pack_w4(codes), unpack_words(pack_words(codes)), unpack_bits(pack_bits(codes, 4), 4, 96)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
