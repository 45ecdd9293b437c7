"""GGUF files: written with the gguf library in every type it knows, and the real built-in model."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_llama import DECODED, DIM, HEADS, KV, QUANTIZABLE, permute, tiny_model, write_gguf

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.describe import describe
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.rewrite import open_any, rewrite_checkpoint
from turbomill.convert.store import convert_checkpoint
from turbomill.convert.store.verify import check_tensors_against
from turbomill.errors import CheckpointError, UnsupportedModelError


@pytest.mark.parametrize("kind", QUANTIZABLE + DECODED, ids=lambda kind: kind.name)
def test_every_type_reads_as_the_library_decodes_it(tmp_path, kind):
    model = tiny_model()
    encoded = write_gguf(tmp_path / "m.gguf", model, kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    dtype = {Q.F32: torch.float32, Q.BF16: torch.bfloat16}.get(kind, torch.float16)
    assert checkpoint.dtype == dtype
    assert sorted(checkpoint.names()) == sorted(model.state_dict())
    for name, value in model.state_dict().items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == dtype and tensor.shape == value.shape == checkpoint.shape(name)
        if name not in encoded:
            assert torch.equal(tensor, value.to(dtype))
            continue
        expected = torch.from_numpy(np.array(gguf.quants.dequantize(encoded[name], kind)))
        heads = HEADS if "q_proj" in name else KV if "k_proj" in name else 0
        if heads:
            tensor = permute(tensor, heads)
        assert torch.equal(tensor, expected.to(dtype))
        if kind in (Q.F32, Q.F16, Q.BF16):
            assert torch.equal(checkpoint.tensor(name), value.to(dtype))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"num_key_value_heads": 4},
    ],
)
def test_f32_file_gives_the_models_logits(tmp_path, fields):
    model = tiny_model(**fields)
    write_gguf(tmp_path / "m.gguf", model, Q.F32)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.tied == model.config.tie_word_embeddings
    assert checkpoint.eos_token_ids == [2, 5]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(load_dense_model(checkpoint)(ids).logits, model(ids).logits)


def test_linear_and_llama3_rope_survive(tmp_path):
    linear = tiny_model(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "linear.gguf", linear, Q.F32, **extra)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama3 = tiny_model(rope_parameters=parameters)
    plain = 5e5 ** (-torch.arange(0, DIM, 2).float() / DIM)
    factors = (plain / llama3.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "llama3.gguf", llama3, Q.F32, **{"rope_freqs.weight": factors})
    for name, model in (("linear", linear), ("llama3", llama3)):
        checkpoint = open_checkpoint(tmp_path / f"{name}.gguf")
        inv_freq = checkpoint.arch.rope_inv_freq(checkpoint.config)
        torch.testing.assert_close(inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    odd = factors * np.linspace(1, 2, len(factors), dtype=np.float32)
    write_gguf(tmp_path / "odd.gguf", llama3, Q.F32, **{"rope_freqs.weight": odd})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight does not follow"):
        open_checkpoint(tmp_path / "odd.gguf")


def test_other_variants_are_refused(tmp_path):
    model = tiny_model()
    for extra, words in (
        ({"llama.rope.scaling.type": "ntk"}, "rope.scaling.type ntk"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.attention.value_length": 32}, "keys and values of different lengths"),
    ):
        write_gguf(tmp_path / "m.gguf", model, Q.F32, **extra)
        with pytest.raises(UnsupportedModelError, match=words):
            open_checkpoint(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match="GGUF architecture mamba is not supported; supported: llama"
    ):
        open_checkpoint(tmp_path / "other.gguf")


def test_yarn_survives(tmp_path):
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model(rope_parameters=parameters)
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    write_gguf(tmp_path / "m.gguf", model, Q.F32, **extra)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    inv_freq, factor = checkpoint.arch.rope(checkpoint.config)
    torch.testing.assert_close(inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(model.model.rotary_emb.attention_scaling)


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_simple_blocks_become_codes_without_rounding(tmp_path, kind):
    """In the canonical linear and in the store, what the library decodes, to the last bit."""
    model = tiny_model(num_key_value_heads=4, attention_bias=True)
    with torch.no_grad():
        up = model.model.layers[0].mlp.up_proj.weight
        up[0] = 0.37  # a range of nothing: Q4_1's scale is 0
        up[1, :32] = -0.25
        up[2] *= 1e-5  # scales below fp16's normal numbers
        up[3] = up[3].abs()
    encoded = write_gguf(tmp_path / "m.gguf", model, kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.scheme == QuantScheme(8 if kind == Q.Q8_0 else 4, 32, kind != Q.Q4_1, kind == Q.Q4_1)
    expected = {}
    for name in checkpoint.arch.linear_prefixes(checkpoint.config):
        values = torch.from_numpy(np.array(gguf.quants.dequantize(encoded[f"{name}.weight"], kind)))
        linear = checkpoint.linear(name)
        assert isinstance(linear, QuantLinear) and linear.scales.dtype == torch.float16
        expected[name.rpartition(".")[2]] = linear.dequantize()
        turned = permute(linear.dequantize(), HEADS) if "q_proj" in name or "k_proj" in name else None
        assert torch.equal(linear.dequantize() if turned is None else turned, values), name
    scales = checkpoint.linear("model.layers.0.mlp.up_proj").scales
    assert kind != Q.Q4_1 or (scales[:, 0] == 0).all()
    store = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "store")
    assert store.manifest["format_version"] == 3
    for stored, name in (("tok_embeddings", "model.embed_tokens"), ("output", "lm_head")):
        values = torch.from_numpy(np.array(gguf.quants.dequantize(encoded[f"{name}.weight"], kind)))
        assert torch.equal(store.linear(stored).dequantize(), values)
    back = open_any(tmp_path / "store")
    assert torch.equal(back.tensor("lm_head.weight"), checkpoint.tensor("lm_head.weight"))
    assert check_tensors_against(store, checkpoint).ok
    qkv = torch.cat([expected[f"{part}_proj"] for part in "qkv"])
    assert torch.equal(store.linear("layers.0.w_qkv").dequantize(), qkv)
    pair = torch.stack([expected[f"{part}_proj"].unflatten(0, (-1, 8)) for part in ("gate", "up")], 1)
    assert torch.equal(store.linear("layers.0.w_gate_up").dequantize(), pair.flatten(0, 2))
    assert torch.equal(store.linear("layers.0.w_down").dequantize(), expected["down_proj"])
    beside = {"scales", "mins"} if kind == Q.Q4_1 else {"scales"}
    found = {name.rpartition(".")[2] for name in store.tensors if name.startswith("layers.0.w_down.")}
    assert found == {"qweight"} | beside
    assert check_tensors_against(store, checkpoint).ok and store.scheme == checkpoint.scheme
    assert describe(tmp_path / "m.gguf").scheme["mins"] is (kind == Q.Q4_1)
    assert describe(store.path).note == ""  # the embedding and the head have codes too
    dense = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "dense", dense=True)
    assert dense.scheme is None and describe(dense.path).note == f"{kind.name} dequantized to float16"
    assert torch.equal(dense.linear("layers.0.w_down").weight, expected["down_proj"].half())


def test_a_split_model_is_one(tmp_path):
    """llama.cpp's gguf-split: the first file has the metadata, all have tensors."""
    model = tiny_model(num_hidden_layers=2)
    write_gguf(tmp_path / "whole.gguf", model, Q.Q8_0)
    whole = gguf.GGUFReader(tmp_path / "whole.gguf")
    files = [tmp_path / f"a model-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for index, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "llama")
        if index == 0:
            for field in whole.fields.values():
                if field.name.startswith("llama.") or field.name.startswith("tokenizer."):
                    writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 3)
        for tensor in whole.tensors[index::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    one, split = open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(files[0])
    assert split.weight_files() == files and sorted(split.names()) == sorted(one.names())
    assert split.config == one.config
    assert all(torch.equal(split.tensor(name), one.tensor(name)) for name in one.names())
    with pytest.raises(CheckpointError, match="one of 3 files of a split model; give the first"):
        open_checkpoint(files[1])
    files[2].unlink()
    with pytest.raises(CheckpointError, match=f"{files[2].name}: missing"):
        open_checkpoint(files[0])


def test_a_tokenizer_beside_the_file_is_used(tmp_path):
    """For architectures whose metadata transformers cannot turn into a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    write_gguf(tmp_path / "m.gguf", tiny_model(), Q.Q8_0)
    with pytest.raises(CheckpointError, match=r"put the model's tokenizer\.json") as error:
        open_checkpoint(tmp_path / "m.gguf").tokenizer()
    assert "\n" not in str(error.value)
    words = Tokenizer(models.WordLevel({"hello": 0, "there": 1, "?": 2}, unk_token="?"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(tmp_path)
    (tmp_path / "diary.txt").write_text("not the model's")
    assert open_checkpoint(tmp_path / "m.gguf").tokenizer().get_vocab()["there"] == 1
    store = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "store")
    assert store.manifest["tokenizer"]["chat_template"] and store.tokenizer().get_vocab()["hello"] == 0
    assert not (tmp_path / "store" / "diary.txt").exists()


def test_fingerprint_names_the_content(tmp_path):
    model = tiny_model()
    write_gguf(tmp_path / "a.gguf", model, Q.Q8_0)
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] += 1
    write_gguf(tmp_path / "c.gguf", model, Q.Q8_0)
    a, b, c = (open_checkpoint(tmp_path / f"{n}.gguf").fingerprint for n in "abc")
    assert a == b != c


@pytest.fixture(scope="module")
def demo():
    return open_checkpoint("demo")


@pytest.mark.slow
@pytest.mark.demo_model
def test_demo_equals_transformers_reader(demo):
    from transformers import AutoModelForCausalLM, GgufConfig

    checkpoint = demo
    theirs = AutoModelForCausalLM.from_pretrained(
        str(checkpoint.path.parent),
        gguf_file=checkpoint.path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    state = theirs.state_dict()
    state.pop("lm_head.weight")
    assert sorted(state) == sorted(checkpoint.names())
    for name, value in state.items():
        assert torch.equal(checkpoint.tensor(name), value.half()), name
    ours = checkpoint.hf_config()
    for key in ("rope_parameters", "rms_norm_eps", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(ours, key) == getattr(theirs.config, key), key


@pytest.mark.slow
@pytest.mark.demo_model
def test_demo_as_hf_directory_answers_paris(demo, tmp_path):
    reopened = open_checkpoint(rewrite_checkpoint(demo, tmp_path / "hf", "hf"))
    tokenizer = reopened.tokenizer()
    assert tokenizer.chat_template and reopened.eos_token_ids == [2]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = load_dense_model(reopened).generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
