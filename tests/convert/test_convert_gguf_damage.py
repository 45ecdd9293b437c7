"""GGUF files that are damaged, incomplete or beyond what can be stored: one line that names what is wrong."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_llama import tiny_model, write_gguf

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.errors import CheckpointError


def refused(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_files_are_one_line_errors(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model(), Q.Q8_0)
    whole = path.read_bytes()
    for cut in (0, 3):
        refused(path, whole[:cut], "not a GGUF file")
    for cut in (4, 20, 200, 1000, len(whole) // 2, len(whole) - 40):
        refused(path, whole[:cut], "truncated")
    refused(path, b"GGML" + whole[4:], r"not a GGUF file: its magic is b'GGML', expected b'GGUF'")
    for version, words in ((1, "GGUF version 1"), (4, "GGUF version 4"), (3 << 24, "a big-endian file")):
        refused(path, whole[:4] + U4(version) + whole[8:], f"{words} is not supported")
    refused(path, whole[:8] + U8(2**60) + whole[16:], "truncated or damaged")  # tensors
    refused(path, whole[:16] + U8(2**60) + whole[24:], "truncated or damaged")  # fields
    refused(path, whole[:24] + U8(2**60) + whole[32:], f"a metadata key needs {2**60} bytes")


def U4(number: int) -> bytes:
    return number.to_bytes(4, "little")


def U8(number: int) -> bytes:
    return number.to_bytes(8, "little")


def text(value: str) -> bytes:
    return U8(len(value)) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + U4(kind) + value


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + U4(len(dims)) + b"".join(map(U8, dims)) + U4(kind) + U8(offset)


def file_of(fields: list[bytes], infos: list[bytes]) -> bytes:
    """A file of version 3 with 64 bytes of data, which begin at a multiple of 32."""
    head = b"GGUF" + U4(3) + U8(len(infos)) + U8(len(fields)) + b"".join(fields + infos)
    return head + bytes(-len(head) % 32) + bytes(64)


@pytest.mark.parametrize(
    ("fields", "infos", "words"),
    [
        ([field("general.alignment", 4, U4(24))], [], "general.alignment is 24, expected a power"),
        ([field("general.alignment", 4, U4(0))], [], "general.alignment is 0"),
        ([field("general.alignment", 8, text("x"))], [], "general.alignment is x"),
        ([field("a", 4, U4(1))] * 2, [], "metadata a is there twice"),
        ([field("a", 99, U4(1))], [], "metadata a: type 99 is not known"),
        ([field("a", 9, U4(0) + U8(2**60))], [], "truncated or damaged: a needs"),
        ([field("a", 9, U4(8) + U8(2**60))], [], "truncated or damaged: a needs"),
        ([field("a", 9, U4(9) + U8(1))], [], "an array of type 9"),
        ([field("a", 8, U8(2) + b"\xff\xff")], [], "is not UTF-8"),
        ([], [info("x", [64], 0, 0)], "tensor x: truncated file"),
        ([], [info("x", [8], 0, 4)], "offset 4 is no multiple of 32"),
        ([], [info("x", [8], 77, 0)], "tensor x: type 77"),
        ([], [info("x", [8], 2, 0)], "rows of 8 are not whole blocks of Q4_0"),
        ([], [info("x", [1] * 5, 0, 0)], "tensor x: 5 dimensions"),
        ([], [info("x", [8], 0, 0)] * 2, "tensor x is there twice"),
        ([], [info("x", [16], 0, 0), info("y", [8], 0, 32)], "tensors x and y overlap"),
        ([], [info("x", [2**62, 2**62], 0, 0)], "tensor x: truncated file"),
        ([], [], "general.architecture is missing"),
        ([field("general.architecture", 8, text("llama"))], [], "token_embd.weight"),
    ],
)
def test_headers_that_cannot_be(tmp_path, fields, infos, words):
    refused(tmp_path / "m.gguf", file_of(fields, infos), words)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("llama.block_count", "llama.block_count is missing"),
        ("llama.attention.head_count", "llama.attention.head_count is missing"),
        ("llama.attention.layer_norm_rms_epsilon", "layer_norm_rms_epsilon is missing"),
        ("llama.feed_forward_length", "llama.feed_forward_length is missing"),
    ],
)
def test_missing_metadata_is_named(tmp_path, key, words):
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model(), Q.Q8_0)
    refused(path, path.read_bytes().replace(key.encode(), key[:-1].encode() + b"_"), words)


def test_values_beyond_fp16_are_named(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    write_gguf(tmp_path / "m.gguf", model, Q.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight: .*float16"):
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
