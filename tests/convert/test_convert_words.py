"""4-bit codes straight from a checkpoint's words, and shards written past the page cache: the same bytes."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbomill.convert import native
from turbomill.convert.base import Checkpoint
from turbomill.convert.formats.awq import AwqFormat, pack_words
from turbomill.convert.formats.bits import pack_bits
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.store import convert_checkpoint, made, shard
from turbomill.convert.store.fuse import join
from turbomill.convert.store.layout import padded, plain_pack_w4
from turbomill.convert.store.made import Whole
from turbomill.convert.store.shard import PAGE, Buffers, Shard

WORDS = {
    "awq": pack_words,
    "kn": lambda codes: pack_bits(codes, 4),
    "nk": lambda codes: pack_bits(codes, 4).T.contiguous(),
}


class Tensors(dict):
    has, tensor = dict.__contains__, dict.__getitem__


@settings(max_examples=60, deadline=None)
@given(
    packing=st.sampled_from(sorted(WORDS)),
    k=st.integers(1, 34),
    sizes=st.one_of(
        st.lists(st.integers(1, 20), min_size=1, max_size=4).map(lambda sizes: (sizes, 0)),
        st.tuples(st.integers(1, 12), st.integers(1, 3)).map(lambda s: ([s[0]] * s[1], 8)),
        st.tuples(st.integers(1, 5), st.just(2)).map(lambda s: ([2 * s[0]] * s[1], 16)),
    ),
    data=st.data(),
)
def test_words_become_the_tiles_of_their_codes(packing, k, sizes, data):
    sizes, block = sizes
    codes = [torch.randint(0, 16, (8 * k, 8 * n), dtype=torch.uint8) for n in sizes]
    expected = plain_pack_w4(join(codes, 1, block))
    first = data.draw(st.integers(0, expected.shape[0] - 1))
    count = data.draw(st.integers(1, expected.shape[0] - first))
    out = bytearray(b"\xff" * (count * padded(8 * k) * 32))
    words = [WORDS[packing](part) for part in codes]
    native.pack_words(packing, words, 8 * k, block, first, memoryview(out))
    assert bytes(out) == expected[first : first + count].numpy().tobytes()


def test_words_that_do_not_fit_together_are_refused():
    words, out = torch.zeros(64, 8, dtype=torch.int32), memoryview(bytearray(64 * 32))
    native.pack_words("awq", [words], 64, 0, 0, out)
    for packing, parts, k, block, first, to in (
        ("awq", [words], 128, 0, 0, out),
        ("kn", [words], 64, 0, 0, out),
        ("nk", [words[:, :7]], 64, 0, 0, out),
        ("nk", [words[:63]], 64, 0, 0, out),
        ("nm", [words], 64, 0, 0, out),
        ("awq", [words, words[:, :4]], 64, 8, 0, out),
        ("awq", [words, words], 64, 4, 0, out),
        ("awq", [], 64, 0, 0, out),
        ("awq", [words], 64, 0, 1, out),
        ("awq", [words], 64, 0, -1, out),
        ("awq", [words], 64, 0, 0, out[1:]),
        ("awq", [words], 64, 0, 0, memoryview(bytearray(64 * 64))[::2]),
    ):
        with pytest.raises(ValueError):
            native.pack_words(packing, parts, k, block, first, to)
    with pytest.raises(BufferError):
        native.pack_words("awq", [words], 64, 0, 0, memoryview(bytes(64 * 32)))


FORMATS = {
    "awq": AwqFormat(QuantScheme(4, 32, False)),
    "awq-sym-all": AwqFormat(QuantScheme(4, -1, True)),
    "gptq": GptqFormat(QuantScheme(4, 64, False)),
    "gptq2-sym": GptqFormat(QuantScheme(4, 128, True), version=2),
    "ct": CompressedTensorsFormat(QuantScheme(4, 32, True)),
    "ct-asym-channel": CompressedTensorsFormat(QuantScheme(4, -1, False)),
}
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "attention_bias": True}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("fields", [SIZES, {"intermediate_size": 384}], ids=["straddling", "whole"])
def test_stores_are_those_of_unpacked_codes(tiny, quantized, tmp_path, monkeypatch, form, fields):
    path, _ = quantized(tiny(**fields), form)
    used = []
    fill = made.Codes.fill
    monkeypatch.setattr(made.Codes, "fill", lambda self, *args: used.append(1) or fill(self, *args))
    convert_checkpoint(path, tmp_path / "direct")
    assert len(used) == 2 * 4  # layers, and a layer's fused linears
    monkeypatch.setattr(Checkpoint, "packed", lambda self, prefix: None)
    convert_checkpoint(path, tmp_path / "unpacked")
    assert len(used) == 2 * 4
    assert _weights(tmp_path / "direct") == _weights(tmp_path / "unpacked")


def _weights(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(store.glob("*.safetensors"))}


@pytest.mark.parametrize("bits", [3, 8])
def test_other_bits_are_unpacked(make_linear, bits):
    scheme = QuantScheme(bits, 32, False)
    for form in (GptqFormat(scheme), CompressedTensorsFormat(scheme)):
        assert form.packed(Tensors(form.pack("x", make_linear(64, 32, scheme))), "x") is None


def test_rows_in_an_order_of_their_own_and_cut_words_are_unpacked(make_linear):
    scheme = QuantScheme(4, 32, False)
    form, linear = GptqFormat(scheme), make_linear(64, 32, scheme)
    tensors = Tensors(form.pack("x", linear))
    assert form.packed(tensors, "x") is not None
    tensors["x.g_idx"] = tensors["x.g_idx"].flip(0)[torch.randperm(64)]
    assert form.packed(tensors, "x") is None
    ct = CompressedTensorsFormat(scheme)
    assert ct.packed(Tensors(ct.pack("x", make_linear(64, 32, scheme))), "x") is not None
    assert ct.packed(Tensors(ct.pack("x", make_linear(64, 36, scheme))), "x") is None


@pytest.mark.parametrize("how", ["direct", "no direct writes", "refused when written"])
def test_pieces_of_a_shard(tmp_path, monkeypatch, how):
    """Odd sizes and places, in any order; pieces of less than a page, and larger than a buffer."""
    monkeypatch.setattr(shard, "PIECE", 1 << 14)
    monkeypatch.setattr(shard, "FLUSH_BYTES", 1 << 13)
    if how == "no direct writes":
        monkeypatch.setattr(shard, "_open_direct", lambda path: None)
    if how == "refused when written":
        direct, write = [], shard._write
        opened = shard._open_direct
        monkeypatch.setattr(shard, "_open_direct", lambda path: direct.append(opened(path)) or direct[-1])

        def refuse(handle, offset, data):
            if handle in direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            write(handle, offset, data)

        monkeypatch.setattr(shard, "_write", refuse)
    sizes = [1, 5000, 12288, 300, 8192, 40000, 4096, 7]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    header, starts = b"h" * PAGE, [PAGE + sum(sizes[:i]) for i in range(len(sizes))]
    with Shard(tmp_path / "s", header, Buffers(1)) as out:
        for index in torch.randperm(len(sizes)).tolist():
            middle = sizes[index] // 3
            for begin, end in ((middle, sizes[index]), (0, middle)):
                if end > begin:
                    out.put(starts[index] + begin, Whole(tensors[index]), begin, end - begin)
    data = header + torch.cat(tensors).numpy().tobytes()
    assert (tmp_path / "s").read_bytes() == data
    assert out.checksum() == f"{shard.crc32(data):08x}"


def test_a_disk_that_fills_up_leaves_nothing(tiny, tmp_path, monkeypatch):
    path, write, count = tiny(), shard._write, []

    def full(handle, offset, data):
        count.append(offset)
        if len(count) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(handle, offset, data)

    monkeypatch.setattr(shard, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(path, tmp_path / "store")
    assert sorted(tmp_path.iterdir()) == [path]
