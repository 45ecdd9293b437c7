"""Writes the tiny models as llama.cpp's converter does: its names, its orders of rows, its metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file
from torch import Tensor

State = dict[str, Tensor]
ARCHS = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "internlm2": gguf.MODEL_ARCH.INTERNLM2,
    "internlm3": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "baichuan": gguf.MODEL_ARCH.BAICHUAN,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3-long": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2-moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3-moe": gguf.MODEL_ARCH.QWEN3MOE,
}
# What llama.cpp computes differently, or has no room for, in the architectures' cases.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"mlp_only_layers": [], "norm_topk_prob": False},
    "internlm2": {"attention_bias": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "sliding_window_pattern": 6},
}


def permute(weight: Tensor, heads: int) -> Tensor:
    """Head by head: rows 0, D/2, 1, D/2 + 1, ... of the checkpoint's."""
    out = torch.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def _rotated_as_neighbours(state: State, config: Any) -> State:
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name in state:
        for part, heads in counts.items():
            if f".{part}." in name:
                state[name] = permute(state[name], heads)
    return state


def _internlm2(state: State, config: Any) -> State:
    kv_heads, dim = config.num_key_value_heads, config.head_dim
    for name in [name for name in state if "wqkv" in name]:
        whole = state.pop(name)
        whole = whole.reshape(kv_heads, -1, dim, *whole.shape[1:])
        for part, rows in (("q", whole[:, :-2]), ("k", whole[:, -2:-1]), ("v", whole[:, -1:])):
            state[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = rows.flatten(0, 2)
    return _rotated_as_neighbours(state, config)


def _baichuan(state: State, config: Any) -> State:
    for name in [name for name in state if "W_pack" in name]:
        for part, rows in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace("W_pack", f"{part}_proj")] = rows
    return _rotated_as_neighbours(state, config)


def _gemma(state: State, _config: Any) -> State:
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in state.items()}


def _stacked_experts(state: State, config: Any) -> State:
    """w1, w2 and w3, or gate, down and up, of all experts in one tensor each."""
    count = getattr(config, "num_local_experts", None) or config.num_experts
    for name in [name for name in state if ".experts.0." in name]:
        parts = [state.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(count)]
        state[name.replace(".experts.0.", ".experts.")] = torch.stack(parts)
    return state


def _mixtral(state: State, config: Any) -> State:
    state = _stacked_experts(state, config)
    state = {name.replace("block_sparse_moe", "layers_moe"): value for name, value in state.items()}
    state = {name.replace("layers_moe", "block_sparse_moe"): value for name, value in state.items()}
    return _rotated_as_neighbours(state, config)


def _qwen_moe(state: State, config: Any) -> State:
    state = _stacked_experts(state, config)
    return {name: value.squeeze() for name, value in state.items()}


REORDERED: dict[str, Callable[[State, Any], State]] = {
    "internlm2": _internlm2,
    "internlm3": _rotated_as_neighbours,
    "mistral": _rotated_as_neighbours,
    "baichuan": _baichuan,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "mixtral": _mixtral,
    "qwen2-moe": _qwen_moe,
    "qwen3-moe": _qwen_moe,
}


def joined_qkv(state: State, _config: Any) -> State:
    """ChatGLM's own checkpoints have q, k and v in one tensor."""
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("self_attn.q_proj", "self_attn.query_key_value")] = torch.cat(parts)
    return state


def _metadata(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else rope
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if name.startswith(("gemma", "phi3")) and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name in ("mixtral", "qwen2-moe", "qwen3-moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if name != "mixtral":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if name == "qwen2-moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def write_model(
    path: Path,
    name: str,
    checkpoint: Path,
    config: Any,
    kind: Callable[[str], Q] = lambda _name: Q.F32,
    change: Callable[[State, Any], State] = lambda state, _config: state,
    vocabulary: Q = Q.F32,
) -> dict[str, Tensor]:
    """The dense checkpoint of case `name` as a GGUF file. `kind` chooses the type of each matrix of a layer,
    by its GGUF name; `vocabulary` is that of the embedding and the output matrix. Returns what each tensor of
    the file stands for, under its GGUF name."""
    arch = ARCHS[name]
    state = {key: value.float() for key, value in load_file(checkpoint / "model.safetensors").items()}
    state = change(REORDERED.get(name, lambda state, _config: state)(state, config), config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _metadata(writer, name, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stands_for = {}
    for key, value in state.items():
        base, suffix = key.rsplit(".", 1)
        found = names.get_name(base)
        assert found is not None, key
        target = f"{found}.{suffix}"
        matrix = value.dim() > 1 and target.startswith("blk.") and "gate_inp" not in target
        chosen = kind(target) if matrix else Q.F32
        if base.endswith(("embed_tokens", "lm_head")):
            chosen = vocabulary
        data = value.contiguous().numpy()
        encoded = data if chosen == Q.F32 else gguf.quants.quantize(data, chosen)
        writer.add_tensor(target, encoded, raw_dtype=chosen)
        stands_for[target] = torch.from_numpy(np.array(gguf.quants.dequantize(encoded, chosen))).reshape(
            value.shape
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for
