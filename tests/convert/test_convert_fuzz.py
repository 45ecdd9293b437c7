"""Mutated headers, configs and stores: every reader has a right answer or one line, never anything else."""

import json
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from architectures import CASES
from gguf_models import write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import BYTE_EDITS, JSON_EDITS, answers_or_says, mutated_bytes, mutated_json
from quantized_models import quantized

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.describe import describe
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.store import convert_checkpoint, open_store

EXAMPLES = int(os.environ.get("TURBOMILL_FUZZ", "80"))  # of each kind; more in a longer run
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="TURBOMILL_FUZZ" not in os.environ,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
SMALL = {"num_hidden_layers": 1, "vocab_size": 32, "pad_token_id": 0}
KINDS = ["llama-ish", "gemma3", "phi3-long", "qwen2-moe", "glm4", "internlm2"]


def use(path: Path, dst: Path) -> None:
    """Everything that reads a checkpoint before and while it becomes a store."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        assert tuple(checkpoint.tensor(name).shape) == checkpoint.shape(name)
    describe(path)
    store = convert_checkpoint(path, dst, force=True)
    assert store.verify() == []


def use_store(path: Path) -> None:
    """Everything that reads a store in Python."""
    store = open_store(path)
    describe(path)
    for name, tensor in store.tensors.items():
        assert tuple(store.tensor(name).shape) == tensor.shape
        if name.endswith(".qweight"):
            store.linear(name.removesuffix(".qweight"), 0 if len(tensor.logical) == 3 else None).dequantize()
    _ = store.fingerprint, store.scheme, store.eos_token_ids, store.bos_token_id, store.context_length


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A tiny one of several architectures, and one of each quantized format."""
    root = tmp_path_factory.mktemp("fuzz")
    for name in KINDS:
        case = CASES["mistral-window" if name == "llama-ish" else name]
        case.make(root / name, torch.float16, **SMALL)
    forms = {
        "awq": AwqFormat(QuantScheme(4, 32, False)),
        "gptq": GptqFormat(QuantScheme(4, 32, True), dynamic={"+:.*up_proj": {"bits": 3}}),
        "ct": CompressedTensorsFormat(QuantScheme(4, 32, False), {"Linear": QuantScheme(4, 32, False)}),
    }
    for name, form in forms.items():
        (root / "llama-ish").rename(root / name)
        made = quantized(root / name, form, torch.float16)
        (root / name).rename(root / "llama-ish")
        made.rename(root / name)
    return root


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


def fresh(source: Path, work: Path) -> Path:
    path = work / "m"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    return path


@pytest.mark.parametrize("name", [*KINDS, "awq", "gptq", "ct"])
def test_the_unchanged_is_read(checkpoints, work, name):
    use(checkpoints / name, work / "store")


@FUZZ
@given(JSON_EDITS, st.sampled_from([*KINDS, "awq", "gptq", "ct"]))
def test_configs(checkpoints, work, edits, name):
    path = fresh(checkpoints / name, work)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(mutated_json(config, edits)))
    answers_or_says(lambda: use(path, work / "store"))


@FUZZ
@given(BYTE_EDITS, st.sampled_from(["config.json", "generation_config.json"]))
def test_bytes_of_json(checkpoints, work, edits, name):
    path = fresh(checkpoints / "llama-ish", work)
    content = (path / name).read_bytes()
    (path / name).write_bytes(mutated_bytes(content, len(content), edits))
    answers_or_says(lambda: use(path, work / "store"))


@FUZZ
@given(BYTE_EDITS, st.sampled_from(["llama-ish", "gptq"]))
def test_safetensors_bytes(checkpoints, work, edits, name):
    path = fresh(checkpoints / name, work)
    content = (path / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    (path / "model.safetensors").write_bytes(mutated_bytes(content, head, edits))
    answers_or_says(lambda: use(path, work / "store"))


@FUZZ
@given(JSON_EDITS, st.sampled_from(["llama-ish", "ct"]))
def test_safetensors_headers(checkpoints, work, edits, name):
    path = fresh(checkpoints / name, work)
    content = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(mutated_json(json.loads(content[8 : 8 + length]), edits)).encode()
    (path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + content[8 + length :]
    )
    answers_or_says(lambda: use(path, work / "store"))


@pytest.fixture(scope="module")
def gguf_file(checkpoints, tmp_path_factory):
    """(content, bytes of its header)."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    model = CASES["qwen2"].make(path.parent / "dense", **SMALL)
    kinds = gguf.GGMLQuantizationType
    write_model(
        path, "qwen2", path.parent / "dense", model.config, lambda n: kinds.Q4_1 if "ffn" in n else kinds.Q8_0
    )
    answers_or_says(lambda: use(path, path.parent / "store"))
    return path.read_bytes(), int(gguf.GGUFReader(path).data_offset)


@FUZZ
@given(BYTE_EDITS)
def test_gguf(gguf_file, work, edits):
    content, head = gguf_file
    (work / "m.gguf").write_bytes(mutated_bytes(content, head, edits))
    answers_or_says(lambda: use(work / "m.gguf", work / "store"))


@pytest.fixture(scope="module")
def stores(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("stores")
    return {name: convert_checkpoint(checkpoints / name, root / name).path for name in ("awq", "qwen2-moe")}


@FUZZ
@given(JSON_EDITS, st.sampled_from(["awq", "qwen2-moe"]))
def test_stores(stores, work, edits, name):
    path = fresh(stores[name], work)
    manifest = json.loads((path / "store.json").read_text())
    (path / "store.json").write_text(json.dumps(mutated_json(manifest, edits)))
    answers_or_says(lambda: use_store(path))


@FUZZ
@given(BYTE_EDITS)
def test_bytes_of_stores(stores, work, edits):
    path = fresh(stores["awq"], work)
    content = (path / "store.json").read_bytes()
    (path / "store.json").write_bytes(mutated_bytes(content, len(content), edits))
    answers_or_says(lambda: use_store(path))
