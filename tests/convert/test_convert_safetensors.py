"""Reading and writing safetensors: the library agrees, and each damage is named."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.safetensors_io import encode_header, read_header
from turbomill.convert.writer import CheckpointWriter
from turbomill.errors import CheckpointError, UsageError

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.uint8),
    "c": torch.tensor(1.5),
}


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(begin, end, shape=(4,), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header, words",
    [
        ({"x": entry(0, 4), "y": entry(2, 6)}, "tensors x and y overlap"),
        ({"x": entry(0, 400, (400,))}, "tensor x: truncated file"),
        ({"x": entry(0, 5)}, "tensor x: offsets 0..5 do not hold"),
        ({"x": entry(-4, 0)}, "tensor x: offsets"),
        ({"x": entry(0, 4, (-2, -2))}, "tensor x: offsets"),
        ({"x": entry(0, 4, dtype="Q3")}, "tensor x: dtype Q3"),
        ({"x": {"dtype": "U8"}}, "tensor x: malformed"),
        ([], "not a JSON object"),
        (b"{broken", "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_unsound_headers(tmp_path, header, words):
    path = tmp_path / "m.safetensors"
    write_raw(path, header, bytes(8))
    with pytest.raises(CheckpointError, match=words) as error:
        read_header(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_lengths_that_cannot_be(tmp_path):
    path = tmp_path / "m.safetensors"
    for content in (
        b"",
        b"\x01\x02",
        (2**60).to_bytes(8, "little") + b"{}",
        (500).to_bytes(8, "little") + b"{}",
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="truncated or not safetensors"):
            read_header(path)


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_encoded_header_is_readable(tmp_path):
    header, entries = encode_header({"x": ("F16", (3, 5)), "y": ("I64", (2,))}, align=4096)
    assert len(header) == 4096 == entries["x"].offset
    (tmp_path / "m.safetensors").write_bytes(header + bytes(46))
    assert read_header(tmp_path / "m.safetensors") == entries
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.get_tensor("x").shape == (3, 5)


def test_sharded_checkpoint_and_its_damages(tiny):
    one, many = open_checkpoint(tiny("one")), open_checkpoint(path := tiny("many", shard="100KB"))
    assert len(many.weight_files()) > 2
    assert sorted(one.names()) == sorted(many.names())
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())
    index = path / "model.safetensors.index.json"
    text = index.read_text()
    shards = sorted(path.glob("*.safetensors"))
    name = "model.norm.weight"

    moved = json.loads(text)
    moved["weight_map"][name] = next(s.name for s in shards if s.name != moved["weight_map"][name])
    index.write_text(json.dumps(moved))
    with pytest.raises(CheckpointError, match=f"tensor {name}, which .*index.* places here"):
        open_checkpoint(path)

    index.write_text(text)
    content = load_file(shards[0])
    save_file({**content, name: torch.ones(128)}, shards[0])
    with pytest.raises(CheckpointError, match=f"tensor {name} is also in") as error:
        open_checkpoint(path)
    assert "safetensors" in str(error.value)

    save_file(content, shards[0])
    open_checkpoint(path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: missing"):
        open_checkpoint(path)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_checkpoint(path)


def test_missing_tensor_suggests_a_name(tiny):
    with pytest.raises(
        CheckpointError, match=r"no tensor model\.norm\.wieght; did you mean model\.norm\.weight"
    ):
        open_checkpoint(tiny()).tensor("model.norm.wieght")


@pytest.mark.parametrize("limit, shards", [(1e9, 1), (40, 2)])
def test_checkpoint_writer(tmp_path, limit, shards):
    with CheckpointWriter(tmp_path / "out", {"model_type": "llama"}, max_shard_bytes=limit) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
        writer.add("d", torch.arange(6).reshape(2, 3).T)  # not contiguous
        (writer.path / "tokenizer.json").write_text("{}")
        assert not (tmp_path / "out").exists()
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    weights = [name for name in files if name.endswith(".safetensors")]
    assert len(weights) == shards
    read = {}
    for name in weights:
        read.update(load_file(tmp_path / "out" / name))
    assert torch.equal(read["d"], torch.arange(6).reshape(2, 3).T)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    if shards > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(read) and set(index["weight_map"].values()) == set(weights)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in read.values())
    assert set(files) - set(weights) - {"model.safetensors.index.json"} == {"config.json", "tokenizer.json"}
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]


def test_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", {}) as writer:
        writer.add("a", torch.ones(3))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_writer_removes_what_a_killed_run_left_and_replaces_whole(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "junk").write_text("x")
    for value in (1.0, 2.0):
        with CheckpointWriter(tmp_path / "out", {}) as writer:
            writer.add("a", torch.full((3,), value))
        assert load_file(tmp_path / "out" / "model.safetensors")["a"][0] == value
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert not (tmp_path / "out" / "junk").exists()


def test_unwritable_destination(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot be written"),
        CheckpointWriter(tmp_path / "file" / "out", {}),
    ):
        pass
