"""Small Llamas as GGUF files, written with the gguf library in every type it knows."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from transformers import LlamaConfig, LlamaForCausalLM

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
