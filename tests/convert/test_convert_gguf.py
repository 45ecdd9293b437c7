"""GGUF files: written with the gguf library in every type it knows, damaged, and the real built-in model."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import LlamaConfig, LlamaForCausalLM

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.describe import describe
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.rewrite import open_any, rewrite_checkpoint
from turbomill.convert.store import convert_checkpoint
from turbomill.convert.store.verify import check_tensors_against
from turbomill.errors import CheckpointError, UnsupportedModelError

HIDDEN, INTER, HEADS, KV, DIM, VOCAB = 256, 256, 4, 2, 64, 64
QUANTIZABLE = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]
# Types that the library only decodes.
DECODED = [kind for kind in gguf.quants._type_traits if kind not in QUANTIZABLE]


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
    """Quantize, or where the library only reads a type, draw blocks of it."""
    array = values.numpy().astype(np.float32)
    if kind == Q.F32:
        return array
    if kind == Q.F16:
        return array.astype(np.float16)
    if kind in QUANTIZABLE:
        return gguf.quants.quantize(array, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng, count = np.random.default_rng(0), array.size // block
    blocks = np.empty((0, size), np.uint8)
    while len(blocks) < count:  # random bytes, where they stand for numbers of a sane size
        drawn = rng.integers(0, 256, (4 * count, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(drawn, kind)
        blocks = np.concatenate([blocks, drawn[(np.abs(values) < 1000).all(1)]])
    return blocks[:count].reshape(*array.shape[:-1], -1)


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
