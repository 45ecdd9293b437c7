"""`turbomill verify`: a sound store passes; every kind of damage is found and named, with exit code 1."""

import json
import shutil

import pytest
from architectures import CASES

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.store import convert_checkpoint, open_store
from turbomill.convert.store.verify import check_tensors_against
from turbomill.convert.store.writer import checksum
from turbomill.quant import QuantOptions, quantize


def checks_of(result) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_store_equals_its_checkpoint(turbomill, tiny, tiny_store):
    result = turbomill("verify", tiny_store, "--against", tiny, "--device", "cpu", "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["ok"]
    found = checks_of(result)
    assert list(found) == ["checksums", "chat template", "tensors", "engine", "logits"]
    assert "Hello" in found["chat template"]["detail"]
    assert "bit by bit" in found["tensors"]["detail"]
    assert "same top token" in found["logits"]["detail"]


def damaged(store, dst, name, change):
    """A copy whose tensor `name` is changed, with checksums that agree: only the comparison can tell."""
    shutil.copytree(store, dst)
    info = open_store(dst).tensors[name]
    with info.path.open("r+b") as file:
        file.seek(info.offset)
        byte = file.read(1)[0]
        file.seek(info.offset)
        file.write(bytes([change(byte)]))
    manifest = json.loads((dst / "store.json").read_text())
    manifest["checksums"][info.path.name] = checksum(info.path)
    (dst / "store.json").write_text(json.dumps(manifest))
    return dst


def test_one_flipped_bit_is_found_and_named(turbomill, tiny, tiny_store, tmp_path):
    bad = damaged(tiny_store, tmp_path / "bad", "layers.1.w_down.weight", lambda byte: byte ^ 1)
    result = turbomill("verify", bad, "--against", tiny, "--device", "cpu", "--json")
    assert result.returncode == 1
    found = checks_of(result)
    assert found["checksums"]["ok"] and not found["tensors"]["ok"]
    assert "1 of" in found["tensors"]["detail"]
    assert "model.layers.1.mlp.down_proj" in found["tensors"]["detail"]


def test_a_damaged_file_is_found_without_the_checkpoint(turbomill, tiny_store, tmp_path):
    shutil.copytree(tiny_store, tmp_path / "bad")
    shard = next((tmp_path / "bad").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = turbomill("verify", tmp_path / "bad", "--device", "cpu")
    assert result.returncode == 1 and "FAIL checksums: not the bytes that were written" in result.stdout


def test_another_models_checkpoint_is_refused_by_name(turbomill, tiny_store, tmp_path):
    CASES["qwen3"].make(tmp_path / "other")
    result = turbomill("verify", tiny_store, "--against", tmp_path / "other", "--device", "cpu", "--json")
    assert result.returncode == 1
    assert "the store is a LlamaForCausalLM" in checks_of(result)["tensors"]["detail"]


def test_a_store_that_cannot_be_read_is_one_line(turbomill, tmp_path):
    result = turbomill("verify", tmp_path)
    assert result.returncode == 1 and "store.json: missing" in result.stderr


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_architecture_compares_equal(name, tmp_path):
    CASES[name].make(tmp_path / "model")
    store = convert_checkpoint(tmp_path / "model", tmp_path / "store")
    check = check_tensors_against(store, open_checkpoint(tmp_path / "model"))
    assert check.ok, check.detail


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_quantized_stores_compare_equal_whatever_they_hold_packed(tiny, tmp_path, bits):
    """4 bits and fewer are packed; 8 bits are stored dense, rounded to the store's dtype."""
    quantize(tiny, tmp_path / "q", "rtn", QuantOptions(bits=bits, group=32))
    store = convert_checkpoint(tmp_path / "q", tmp_path / "store")
    check = check_tensors_against(store, open_checkpoint(tmp_path / "q"))
    assert check.ok, check.detail
    other = quantize(tiny, tmp_path / "other", "rtn", QuantOptions(bits=bits, group=64)).work_dir
    check = check_tensors_against(store, open_checkpoint(other))
    assert not check.ok and "q_proj" in check.detail
