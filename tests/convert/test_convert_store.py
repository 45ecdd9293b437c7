"""Checkpoint to store and back: every weight bit for bit, every damage one line, nothing half-written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.hf import HfCheckpoint
from turbomill.convert.linear import DenseLinear, QuantLinear, QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.rewrite import rewrite_checkpoint
from turbomill.convert.store import convert, convert_checkpoint, open_store
from turbomill.convert.store.verify import check_tensors_against
from turbomill.errors import CheckpointError, UnsupportedModelError, UsageError


def expected_fused(checkpoint, index):
    """The fused weights (fp32 [N, K]) and biases of one layer, row by row from the unfused linears."""

    def part(name):
        linear = checkpoint.linear(f"model.layers.{index}.{name}")
        n = linear.shape[1]
        return linear.dequantize(), (torch.zeros(n) if linear.bias is None else linear.bias.float())

    def interleaved(gate, up):
        rows = []
        for first in range(0, len(gate), 8):
            rows += [*gate[first : first + 8], *up[first : first + 8]]
        return torch.stack(rows)

    q, k, v = (part(f"self_attn.{name}_proj") for name in "qkv")
    gate, up = part("mlp.gate_proj"), part("mlp.up_proj")
    return {
        "w_qkv": (torch.cat([q[0], k[0], v[0]]), torch.cat([q[1], k[1], v[1]])),
        "w_o": part("self_attn.o_proj"),
        "w_gate_up": (interleaved(gate[0], up[0]), interleaved(gate[1], up[1])),
        "w_down": part("mlp.down_proj"),
    }


def assert_equals_source(store, checkpoint):
    arch = checkpoint.arch
    for index in range(store.model["num_layers"]):
        for name, (weight, bias) in expected_fused(checkpoint, index).items():
            linear = store.linear(f"layers.{index}.{name}")
            assert torch.equal(linear.dequantize(), weight), name
            assert torch.equal(torch.zeros(len(bias)) if linear.bias is None else linear.bias.float(), bias)
        for norm, stored in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")):
            source = checkpoint.tensor(f"model.layers.{index}.{norm}.weight")
            assert torch.equal(store.tensor(f"layers.{index}.{stored}.weight"), source)
    assert torch.equal(store.tensor("tok_embeddings.weight"), checkpoint.tensor(arch.embedding))
    assert torch.equal(store.tensor("norm.weight"), checkpoint.tensor(arch.final_norm))
    assert ("output.weight" in store.tensors) == (not checkpoint.tied)
    if not checkpoint.tied:
        assert torch.equal(store.tensor("output.weight"), checkpoint.tensor(arch.head))
    assert torch.equal(store.tensor("rope.inv_freq"), arch.rope_inv_freq(checkpoint.config))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 80, "num_attention_heads": 8, "num_key_value_heads": 1},
        {"shard": "100KB"},
    ],
)
def test_dense_round_trip(tiny, tmp_path, fields):
    path = tiny(**fields)
    store = convert_checkpoint(path, tmp_path / "store")
    assert store.scheme is None
    assert_equals_source(store, open_checkpoint(path))


def test_manifest(tiny, tmp_path):
    path = tiny()
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (path / "modeling_own.py").write_text("# code")
    store = convert_checkpoint(str(path), tmp_path / "store")
    checkpoint = open_checkpoint(path)
    assert store.model == checkpoint.arch.model_config(checkpoint.config)
    assert (store.context_length, store.eos_token_ids, store.bos_token_id) == (512, [2, 3], 1)
    manifest = json.loads((tmp_path / "store" / "store.json").read_text())
    assert manifest["format_version"] == 1 and manifest["dtype"] == "float16"
    assert manifest["source"] == {"path": str(path), "fingerprint": checkpoint.fingerprint}
    assert manifest["tokenizer"] == {
        "files": ["tokenizer.json", "tokenizer_config.json"],
        "chat_template": True,
    }
    assert manifest["provenance"]["versions"]["turbomill"]
    assert store.disk_bytes == sum(f.stat().st_size for f in (tmp_path / "store").glob("*.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json", "modeling_own.py", "generation_config.json"):
        assert (tmp_path / "store" / name).read_bytes() == (path / name).read_bytes()
    assert not (tmp_path / "store" / "config.json").exists()
    assert store.hf_config().hidden_size == 128
    weights = load_file(next((tmp_path / "store").glob("*.safetensors")))
    assert set(weights) == set(store.tensors)
    for name, tensor in store.tensors.items():
        assert torch.equal(weights[name], store.tensor(name))
        assert tensor.offset % (64 if tensor.nbytes % 64 == 0 else 2) == 0
    assert min(t.offset for t in store.tensors.values()) % 4096 == 0
    assert store.verify() == []
    again = convert_checkpoint(path, tmp_path / "again")
    assert again.fingerprint == store.fingerprint


SCHEMES = [
    AwqFormat(QuantScheme(4, 32, False)),
    AwqFormat(QuantScheme(4, 64, True)),
    GptqFormat(QuantScheme(4, 32, True), 1),
    GptqFormat(QuantScheme(4, 64, False), 2),
    GptqFormat(QuantScheme(4, 128, False), 1),  # does not divide 192: a ragged last group
    GptqFormat(QuantScheme(4, -1, False), 1),
    CompressedTensorsFormat(QuantScheme(4, 32, True)),
    CompressedTensorsFormat(QuantScheme(4, 64, False)),
    CompressedTensorsFormat(QuantScheme(4, -1, False)),
]


@pytest.mark.parametrize("form", SCHEMES, ids=lambda form: f"{form.name}-{form.scheme}")
@pytest.mark.parametrize(
    "fields", [{}, {"attention_bias": True, "dtype": torch.bfloat16}], ids=["fp16", "bf16-bias"]
)
def test_quantized_round_trip(tiny, quantized, tmp_path, form, fields):
    path, linears = quantized(tiny(**fields), form)
    checkpoint = open_checkpoint(path)
    assert checkpoint.scheme == form.scheme
    for prefix, linear in linears.items():
        read = checkpoint.linear(prefix)
        assert torch.equal(read.codes, linear.codes) and torch.equal(read.zeros, linear.zeros)
    store = convert_checkpoint(path, tmp_path / "store")
    assert_equals_source(store, checkpoint)
    for name in ("layers.0.w_qkv", "layers.1.w_gate_up"):
        assert isinstance(store.linear(name), QuantLinear)
        assert store.tensors[f"{name}.qweight"].layout == "w4.n64k64"
        assert (f"{name}.zeros" in store.tensors) == (not form.scheme.symmetric)
        scales = store.tensors[f"{name}.scales"]
        assert scales.layout == "group.n64" and scales.dtype == str(checkpoint.dtype).removeprefix("torch.")


def test_modules_left_dense(tiny, quantized, tmp_path):
    path, _ = quantized(
        tiny(), AwqFormat(QuantScheme(4, 32, False), ["down_proj"]), keep=("layers.1.", "down_proj")
    )
    store = convert_checkpoint(path, tmp_path / "store")
    assert_equals_source(store, open_checkpoint(path))
    kinds = {name: type(store.linear(name)) for name in ("layers.0.w_o", "layers.0.w_down", "layers.1.w_o")}
    assert list(kinds.values()) == [QuantLinear, DenseLinear, DenseLinear]


def test_reference_model_of_a_quantized_checkpoint(tiny, quantized, tmp_path):
    path, linears = quantized(tiny(attention_bias=True), AwqFormat(QuantScheme(4, 32, False)))
    model = load_dense_model(open_checkpoint(path))
    for prefix, linear in linears.items():
        module = model.get_submodule(prefix)
        assert torch.equal(module.weight, linear.dequantize())
        if linear.bias is not None:
            assert torch.equal(module.bias, linear.bias.float())
    dense = open_checkpoint(rewrite_checkpoint(open_checkpoint(path), tmp_path / "dense", "hf"))
    assert dense.scheme is None and "quantization_config" not in dense.config
    name = next(iter(linears))
    assert torch.equal(dense.linear(name).weight, linears[name].dequantize().half())


def rewrite(path: Path, change) -> None:
    """Load a checkpoint's one file, let `change` edit the dict, save it."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_every_problem_is_listed_at_once(tiny, tmp_path):
    path = tiny()

    def damage(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(3, 5).half()
        tensors["model.layers.1.mystery"] = torch.zeros(1)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    rewrite(path, damage)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(path, tmp_path / "store")
    text = str(error.value)
    assert "model.layers.0.mlp.up_proj.weight is missing" in text.replace("qweight", "weight")
    assert "model.layers.1.self_attn.q_proj.weight is [3, 5], expected [128, 128]" in text
    assert "model.layers.1.mystery is not part of LlamaForCausalLM" in text
    assert "rotary_emb" not in text and "\n" not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny"]


def test_tied_head_must_equal_the_embedding(tiny, tmp_path):
    path = tiny(tie_word_embeddings=True)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "output.weight" not in convert_checkpoint(path, tmp_path / "store").tensors
    rewrite(path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        convert_checkpoint(path, tmp_path / "other")


def test_spare_biases_of_zeros_are_accepted(tiny, quantized, tmp_path):
    path, _ = quantized(tiny(), GptqFormat(QuantScheme(4, 32, True)))
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(path, lambda t: t.update({name: torch.zeros(128).half()}))
    assert convert_checkpoint(path, tmp_path / "store").tensors["layers.0.w_qkv.bias"].shape == (256,)
    rewrite(path, lambda t: t[name].add_(1))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is not part of"):
        convert_checkpoint(path, tmp_path / "other")


MIXED = [
    (GptqFormat(QuantScheme(3, 32, True)), "packed"),
    (GptqFormat(QuantScheme(2, 64, False)), "packed"),
    (GptqFormat(QuantScheme(4, 32, True), dynamic={r".*k_proj": {"group_size": 64}}), "packed"),
    (GptqFormat(QuantScheme(4, 128, True), dynamic={r".*[vu]\w*_proj": {"bits": 3, "sym": False}}), "packed"),
    (GptqFormat(QuantScheme(4, -1, True), dynamic={r".*q_proj": {"group_size": 32}}), "packed"),
    (GptqFormat(QuantScheme(4, 96, False)), "packed"),  # K is 128 and 192
    (CompressedTensorsFormat(QuantScheme(3, -1, False)), "packed"),
    (GptqFormat(QuantScheme(8, 32, True)), "bytes"),
    (CompressedTensorsFormat(QuantScheme(5, -1, False)), "bytes"),
    (AwqFormat(QuantScheme(4, 16, False)), "dense"),
    (GptqFormat(QuantScheme(4, 32, True), dynamic={r".*(k|up)_proj": {"bits": 8}}), "bytes"),
    (GptqFormat(QuantScheme(4, 32, False), dynamic={r".*(k|up)_proj": {"bits": 8, "sym": True}}), "bytes"),
]
LAYOUTS = {"packed": "w4.n64k64", "bytes": "w8.n64k64"}


@pytest.mark.parametrize(("form", "kind"), MIXED)
def test_schemes_meet_in_a_layout(tiny, quantized, tmp_path, form, kind):
    """At most 4 bits are stored exactly in 4, at most 8 in 8; what cannot be is dense, rounded to the model's
    16 bits."""
    path, linears = quantized(tiny(), form)
    store = convert_checkpoint(path, tmp_path / "store")
    checkpoint = open_checkpoint(path)
    assert all(torch.equal(checkpoint.linear(n).codes, linear.codes) for n, linear in linears.items())
    for index in range(2):
        for name, (weight, _) in expected_fused(checkpoint, index).items():
            linear = store.linear(f"layers.{index}.{name}")
            if isinstance(linear, QuantLinear):
                assert torch.equal(linear.dequantize(), weight), name
            else:
                assert torch.equal(linear.weight, weight.half()), name
    if kind == "dense":
        assert isinstance(store.linear("layers.1.w_qkv"), DenseLinear)
    else:
        assert store.tensors["layers.1.w_qkv.qweight"].layout == LAYOUTS[kind]
    assert store.manifest["format_version"] == (3 if kind == "bytes" else 1)
    assert check_tensors_against(store, checkpoint).ok


def test_a_quantized_linear_fused_with_a_dense_one(tiny, quantized, tmp_path):
    form = CompressedTensorsFormat(QuantScheme(4, 32, False), ignore=("lm_head", "re:.*v_proj"))
    path, _ = quantized(tiny(dtype=torch.bfloat16), form, keep=("v_proj",))
    store, checkpoint = convert_checkpoint(path, tmp_path / "store"), open_checkpoint(path)
    weight, _ = expected_fused(checkpoint, 0)["w_qkv"]
    assert torch.equal(store.linear("layers.0.w_qkv").weight, weight.bfloat16())
    assert isinstance(store.linear("layers.0.w_o"), QuantLinear)


def test_weights_beyond_fp16_are_refused(tiny, quantized, tmp_path):
    path, _ = quantized(tiny(), GptqFormat(QuantScheme(4, 16, True)))  # a group that is stored dense
    rewrite(path, lambda t: t["model.layers.1.mlp.up_proj.scales"].fill_(60000))
    with pytest.raises(CheckpointError, match=r"up_proj: dequantized weights exceed torch.float16"):
        convert_checkpoint(path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_group_that_does_not_divide(tiny, quantized, tmp_path):
    path, _ = quantized(tiny(), AwqFormat(QuantScheme(4, 64, False)))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128  # 192 is not a multiple
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"down_proj: AWQ gemm needs K divisible.*K=192.*group 128"):
        convert_checkpoint(path, tmp_path / "store")


def test_unknown_architecture(tiny, tmp_path):
    path = tiny()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["RwkvForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="RwkvForCausalLM"):
        convert_checkpoint(path, tmp_path / "store")


def test_several_shards(tiny, tmp_path):
    path = tiny()
    store = convert_checkpoint(path, tmp_path / "store", shard_bytes=100_000)
    assert len(list((tmp_path / "store").glob("weights-*-of-*.safetensors"))) > 3
    assert_equals_source(store, open_checkpoint(path))


def test_the_source_leaves_memory_while_it_is_converted(tiny, tmp_path, monkeypatch):
    released = []
    release = HfCheckpoint.release
    monkeypatch.setattr(convert, "RELEASE_BYTES", 1 << 14)
    monkeypatch.setattr(
        HfCheckpoint, "release", lambda self: released.append(len(self._maps)) or release(self)
    )
    path = tiny()
    store = convert_checkpoint(path, tmp_path / "store")
    largest = max(tensor.nbytes for tensor in store.tensors.values())
    assert (
        len(released) >= sum(tensor.nbytes for tensor in store.tensors.values()) // (largest + (1 << 14)) > 2
    )
    assert all(released), "nothing was mapped"
    assert_equals_source(store, open_checkpoint(path))


def test_destinations(tiny, tmp_path):
    path = tiny()
    store = convert_checkpoint(path, tmp_path / "store")
    with pytest.raises(UsageError, match="--force"):
        convert_checkpoint(path, tmp_path / "store")
    (tmp_path / "store" / "mine.txt").write_text("x")
    assert convert_checkpoint(path, tmp_path / "store", force=True).fingerprint == store.fingerprint
    assert not (tmp_path / "store" / "mine.txt").exists()
    for dst in (path, path / "inside", tmp_path):
        with pytest.raises(UsageError, match="choose another"):
            convert_checkpoint(path, dst, force=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("x")
    with pytest.raises(UsageError, match="exists and is not a store"):
        convert_checkpoint(path, tmp_path / "notes", force=True)
    assert (tmp_path / "notes" / "diary.txt").exists()
    with pytest.raises(CheckpointError, match="this is a store"):
        convert_checkpoint(tmp_path / "store", tmp_path / "twice")


def test_failure_midway_leaves_nothing(tiny, quantized, tmp_path):
    path, _ = quantized(tiny(), GptqFormat(QuantScheme(4, 32, True)))
    name = "model.layers.1.mlp.down_proj.scales"
    rewrite(path, lambda t: t[name].fill_(float("inf")))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="down_proj: scales hold inf"):
        convert_checkpoint(path, tmp_path / "store")
    assert sorted(tmp_path.iterdir()) == before


def test_stale_partial_directory_is_cleaned(tiny, tmp_path):
    (tmp_path / ".store.partial").mkdir()
    (tmp_path / ".store.partial" / "weights-00001-of-00001.safetensors").write_text("x")
    convert_checkpoint(tiny(), tmp_path / "store")
    assert not (tmp_path / ".store.partial").exists()


def test_damaged_stores(tiny, tmp_path):
    path = tmp_path / "store"
    convert_checkpoint(tiny(), path)
    shard = next(path.glob("*.safetensors"))
    manifest, weights = (path / "store.json").read_text(), shard.read_bytes()

    shard.write_bytes(weights[:-1])
    with pytest.raises(
        CheckpointError, match=f"{shard.name}: {len(weights) - 1} bytes, expected {len(weights)}"
    ):
        open_store(path)
    shard.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert open_store(path).verify() == [shard.name]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: missing"):
        open_store(path)
    shard.write_bytes(weights)

    changed = json.loads(manifest)
    for change, words in (
        ({"format_version": 4}, "format_version 4, this turbomill reads 1, 2, 3;"),
        ({"model": None}, "model missing"),
        ({"tensors": {"x": {"layout": "vector"}}}, "tensor x: malformed"),
    ):
        edited = {k: v for k, v in {**changed, **change}.items() if v is not None or k == "scheme"}
        (path / "store.json").write_text(json.dumps(edited))
        with pytest.raises(CheckpointError, match=words):
            open_store(path)
    changed["tensors"]["norm.weight"]["offset"] = len(weights)
    (path / "store.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"norm\.weight: reaches past the end"):
        open_store(path)
    (path / "store.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_store(path)
    (path / "store.json").unlink()
    with pytest.raises(CheckpointError, match=r"store\.json: missing: a half-written"):
        open_store(path)
    with pytest.raises(CheckpointError, match="half-written store"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_store(tmp_path / "nowhere")


def test_store_without_tokenizer_says_so(tiny, tmp_path):
    store = convert_checkpoint(tiny(), tmp_path / "store")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        store.tokenizer()
