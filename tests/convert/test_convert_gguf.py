"""GGUF files: written with the gguf library in every type it knows, damaged, and the real built-in model."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import LlamaConfig, LlamaForCausalLM

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model, write_hf
from turbomill.errors import CheckpointError, UnsupportedModelError

HIDDEN, INTER, HEADS, KV, DIM, VOCAB = 256, 256, 4, 2, 64, 64
QUANTIZABLE = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]
K_QUANTS = [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order, head by head: rows 0, D/2, 1, D/2 + 1, ... of the checkpoint's."""
    out = torch.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def encode(values: torch.Tensor, kind: Q) -> np.ndarray:
    """Quantize, or where the library only reads a type, draw blocks of it with small finite scales."""
    array = values.numpy().astype(np.float32)
    if kind == Q.F32:
        return array
    if kind == Q.F16:
        return array.astype(np.float16)
    if kind not in K_QUANTS:
        return gguf.quants.quantize(array, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (array.size // block, size), dtype=np.uint8)
    scales = {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}[kind]
    for at in scales:  # fp16 super-block scales
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 0.01, np.float16).view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def write_gguf(path: Path, model: LlamaForCausalLM, kind: Q, **extra) -> dict[str, np.ndarray]:
    """A GGUF file as llama.cpp's converter writes it; returns what each matrix was encoded to."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in extra.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_tensor(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    encoded = {}
    for name, value in model.state_dict().items():
        base, suffix = name.rsplit(".", 1)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = value.detach().float()
        if "q_proj" in name:
            value = permute(value, config.num_attention_heads)
        if "k_proj" in name:
            value = permute(value, config.num_key_value_heads)
        target = f"{names.get_name(base)}.{suffix}"
        if value.dim() == 1:
            writer.add_tensor(target, value.numpy())
        else:
            encoded[name] = encode(value, kind)
            writer.add_tensor(target, encoded[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return encoded


def tiny_model(**fields) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            **fields,
        }
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", QUANTIZABLE + K_QUANTS, ids=lambda kind: kind.name)
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
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type yarn"),
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
    with pytest.raises(UnsupportedModelError, match="GGUF architecture mamba"):
        open_checkpoint(tmp_path / "other.gguf")


def test_damaged_files_are_one_line_errors(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model(), Q.Q8_0)
    whole = path.read_bytes()
    for cut in (0, 3, 4, 20, 200, 1000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointError, match="magic"):
        open_checkpoint(path)
    path.write_bytes(whole[:8] + (2**60).to_bytes(8, "little") + whole[16:])
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(path)


def test_values_beyond_fp16_are_named(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    write_gguf(tmp_path / "m.gguf", model, Q.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight: .*float16"):
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight")


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
    reopened = open_checkpoint(write_hf(demo, tmp_path / "hf"))
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
