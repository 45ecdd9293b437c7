"""Checkpoints and destinations that are odd, or wrong: the right store, or one line that names the thing."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.store import convert_checkpoint, open_store
from turbomill.errors import CheckpointError, UsageError


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def refused(path: Path, dst: Path, words: str, kind: type[Exception] = CheckpointError) -> None:
    before = sorted(dst.parent.iterdir()) if dst.parent.is_dir() else None
    with pytest.raises(kind, match=words) as error:
        convert_checkpoint(path, dst)
    assert "\n" not in str(error.value)
    assert before is None or sorted(dst.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("self_attn.q_proj.qweight", torch.int64, "q_proj.qweight is int64, expected int32"),
        ("mlp.up_proj.qzeros", torch.float16, "up_proj.qzeros is float16, expected int32"),
        ("mlp.up_proj.g_idx", torch.float32, "up_proj.g_idx is float32, expected int32 or int64"),
        (
            "mlp.up_proj.scales",
            torch.int32,
            "up_proj.scales is int32, expected float16 or bfloat16 or float32",
        ),
        ("input_layernorm.weight", torch.int8, "input_layernorm.weight is int8, expected float16"),
        ("input_layernorm.weight", torch.float64, "input_layernorm.weight is float64, expected float16"),
    ],
)
def test_a_wrong_dtype_is_named(tiny, quantized, tmp_path, name, dtype, words):
    path, _ = quantized(tiny(), GptqFormat(QuantScheme(4, 32, True)))
    full = f"model.layers.1.{name}"
    rewrite(path, **{full: load_file(path / "model.safetensors")[full].to(dtype)})
    refused(path, tmp_path / "store", words.replace(".", r"\."))


def test_a_shard_in_another_float_keeps_its_values(tiny, tmp_path):
    """One shard saved in fp32, the others in fp16: what is fused with it becomes fp32."""
    path = tiny()
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    odd = tensors[name].float() + 1e-5
    rewrite(path, **{name: odd})
    store = convert_checkpoint(path, tmp_path / "store")
    qkv = store.linear("layers.0.w_qkv").weight
    assert qkv.dtype == torch.float32 and torch.equal(qkv[128:192], odd)
    assert store.linear("layers.1.w_qkv").weight.dtype == torch.float16


def test_a_tensor_twice_in_one_header(tiny, tmp_path):
    path = tiny()
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode().strip()
    again = header[:-1] + ',"model.norm.weight":' + json.dumps(json.loads(header)["model.norm.weight"]) + "}"
    file.write_bytes(len(again).to_bytes(8, "little") + again.encode() + data[8 + length :])
    refused(path, tmp_path / "store", r"model\.safetensors: tensor model\.norm\.weight is there twice")


def test_an_untied_model_without_a_head(tiny, tmp_path):
    path = tiny()
    rewrite(path, **{"lm_head.weight": None})
    refused(path, tmp_path / "store", r"lm_head\.weight is missing; tie_word_embeddings is false")


def test_awq_without_qzeros(tiny, quantized, tmp_path):
    path, linears = quantized(tiny(dtype=torch.bfloat16), AwqFormat(QuantScheme(4, 32, True)))
    tensors = load_file(path / "model.safetensors")
    rewrite(path, **{name: None for name in tensors if name.endswith("qzeros")})
    store = convert_checkpoint(path, tmp_path / "store")
    expected = linears["model.layers.1.mlp.down_proj"].dequantize()
    assert torch.equal(store.linear("layers.1.w_down").dequantize(), expected)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["sym"] = False
    (path / "config.json").write_text(json.dumps(config))
    refused(path, tmp_path / "other", r"q_proj\.qzeros is missing")


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def add_tokenizer(path: Path, words: int = 90, **fields) -> None:
    vocab = {f"w{i}": i for i in range(words - 1)} | {"?": words - 1}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="?")))
    fast.save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("where", ["jinja", "config", "absent", "null"])
def test_chat_templates(tiny, tmp_path, where):
    path = tiny()
    add_tokenizer(path, **({"chat_template": TEMPLATE} if where == "config" else {}))
    if where == "jinja":
        (path / "chat_template.jinja").write_text(TEMPLATE)
    if where == "null":
        add_tokenizer(path, chat_template=None)
    store = convert_checkpoint(path, tmp_path / "store")
    there = where in ("jinja", "config")
    assert store.manifest["tokenizer"]["chat_template"] is there
    tokenizer = store.tokenizer()
    assert bool(tokenizer.chat_template) is there
    if there:
        chat = [{"role": "user", "content": "w1"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "w1"


def test_more_ids_than_rows_are_said(tiny, tmp_path, caplog):
    logging.getLogger("turbomill").propagate = True
    for words, said in ((96, False), (97, True)):  # 96 rows
        path = tiny(f"m{words}")
        add_tokenizer(path, words)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "turbomill.convert"):
            convert_checkpoint(path, tmp_path / f"store{words}")
        assert ("ids up to 96, the embedding has 96 rows" in caplog.text) is said


def test_destinations_that_cannot_be(tiny, tmp_path):
    path = tiny()
    (tmp_path / "link").symlink_to(path)
    refused(path, tmp_path / "link", "lies in the checkpoint", UsageError)
    refused(path, tmp_path / "link" / "inside", "lies in the checkpoint", UsageError)
    (tmp_path / "file").write_text("mine")
    refused(path, tmp_path / "file", "file: exists and is not a store", UsageError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_destination(tiny, tmp_path, monkeypatch):
    path = tiny()

    def refuse(self, *_args, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # whatever the tests run as, root too
    refused(path, tmp_path / "store", "store: cannot be written: Read-only file system", UsageError)


def test_a_hub_snapshot_of_links(tiny, tmp_path):
    """As huggingface_hub's cache lays it out: each file a link to a blob that is named by its content."""
    plain = tiny(shard="100KB")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(plain.iterdir())):
        shutil.copyfile(file, blobs / f"blob{index}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{index}")
    linked = convert_checkpoint(snapshot, tmp_path / "linked")
    assert linked.fingerprint == convert_checkpoint(plain, tmp_path / "plain").fingerprint
    assert (linked.path / "generation_config.json").is_file()
    assert not any(file.is_symlink() for file in linked.path.iterdir())


def test_names_with_spaces(tiny, tmp_path):
    path = tiny("my model (v1, best)")
    store = convert_checkpoint(str(path), tmp_path / "a store of it")
    assert open_store(str(tmp_path / "a store of it")).fingerprint == store.fingerprint
    assert store.manifest["source"]["path"] == str(path)


@pytest.mark.parametrize("form", ["zip", "legacy", "sharded"])
def test_pickled_weights_only_when_asked_for(tiny, tmp_path, form):
    path = tiny()
    expected = convert_checkpoint(path, tmp_path / "expected")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[::2], names[1::2]] if form == "sharded" else [names]
    files = [f"pytorch_model-{i + 1}.bin" for i in range(2)] if form == "sharded" else ["pytorch_model.bin"]
    for file, part in zip(files, parts, strict=True):
        state = {name: tensors[name] for name in part}
        torch.save(state, path / file, _use_new_zipfile_serialization=form != "legacy")
    if form == "sharded":
        index = {"weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part}}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused(
        path, tmp_path / "store", r"only pytorch_model\S*\.bin: save .* or convert it with --allow-pickle"
    )
    store = convert_checkpoint(path, tmp_path / "store", allow_pickle=True)
    assert store.manifest["checksums"] == expected.manifest["checksums"]
    if form == "sharded":
        (path / files[1]).unlink()
        with pytest.raises(CheckpointError, match=r"pytorch_model-2\.bin: missing"):
            open_checkpoint(path, allow_pickle=True)


class Mischief:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/turbomill-was-run"),))


@pytest.mark.parametrize("content", ["code", "number", "rubbish", "truncated"])
def test_pickles_of_other_things(tiny, content):
    path = tiny()
    file = path / "pytorch_model.bin"
    torch.save({"x": Mischief()} if content == "code" else {"x": 3}, file)
    if content == "rubbish":
        file.write_bytes(b"not a pickle")
    if content == "truncated":
        file.write_bytes(file.read_bytes()[:200])
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: ") as error:
        open_checkpoint(path, allow_pickle=True)
    assert "\n" not in str(error.value)
    assert not Path("/tmp/turbomill-was-run").exists()
