"""Llama: RMSNorm, RoPE, grouped-query attention, SiLU-gated MLP; optional biases and tied embeddings.

What other architectures share with it, they take from here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turbomill.convert.models.base import Architecture, Fusion, HfConfig, ScaleGroup, register
from turbomill.convert.models.hf import (
    check_activation,
    check_rope,
    check_sizes,
    heads_of,
    rope,
    window_fields,
)

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkv")
ATTENTION_FUSIONS = (Fusion("w_qkv", ATTENTION), Fusion("w_o", ("self_attn.o_proj",)))


def linear_shapes(config: HfConfig) -> dict[str, tuple[int, int]]:
    """(K, N) of each of a layer's linears."""
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, kv_heads, dim = heads_of(config)
    return {
        "self_attn.q_proj": (hidden, heads * dim),
        "self_attn.k_proj": (hidden, kv_heads * dim),
        "self_attn.v_proj": (hidden, kv_heads * dim),
        "self_attn.o_proj": (heads * dim, hidden),
        "mlp.gate_proj": (hidden, inter),
        "mlp.up_proj": (hidden, inter),
        "mlp.down_proj": (inter, hidden),
    }


def linear_biases(config: HfConfig) -> dict[str, bool]:
    """Which of a layer's linears have a bias."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {name: attention if name.startswith("self_attn") else mlp for name in linear_shapes(config)}


def attention_scale_groups(_config: HfConfig) -> tuple[ScaleGroup, ...]:
    """AWQ's groups of the attention. Under GQA the query heads of a KV head share o_proj's scale."""
    return (
        ScaleGroup("input_layernorm", ATTENTION, "self_attn"),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj"),
    )


def scale_groups(config: HfConfig) -> tuple[ScaleGroup, ...]:
    """AWQ's groups (arXiv 2306.00978)."""
    return (
        *attention_scale_groups(config),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp"),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
    )


def sizes(config: HfConfig) -> dict[str, int]:
    """The fields of turbomill._core.ModelConfig that every model states alike."""
    heads, kv_heads, dim = heads_of(config)
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": int(config["intermediate_size"]),
    }


def model_config(config: HfConfig) -> dict[str, Any]:
    """The fields of turbomill._core.ModelConfig."""
    return {
        **sizes(config),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_attention_factor": rope(config)[1],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def windowed_config(config: HfConfig) -> dict[str, Any]:
    """Llama's fields and the layers' sliding windows."""
    return model_config(config) | window_fields(config)


def check(config: HfConfig) -> None:
    """Refuse what this file does not describe: other activations, position-dependent RoPE, odd head sizes."""
    check_sizes(config)
    check_activation(config)
    check_rope(config)


LLAMA = register(
    Architecture(
        name="LlamaForCausalLM",
        models="Llama 2, Llama 3.x, SmolLM2 and other models of Llama's shape",
        layer_prefix="model.layers.{i}.",
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        norms={"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        fusions=(
            *ATTENTION_FUSIONS,
            Fusion("w_gate_up", ("mlp.gate_proj", "mlp.up_proj"), interleave=8),
            Fusion("w_down", ("mlp.down_proj",)),
        ),
        linear_shapes=linear_shapes,
        linear_biases=linear_biases,
        scale_groups=scale_groups,
        model_config=model_config,
        rope=rope,
        check=check,
    )
)

MISTRAL = register(
    replace(
        LLAMA,
        name="MistralForCausalLM",
        models="Mistral 7B, Mistral Nemo, Mistral Small (text); sliding window",
        model_config=windowed_config,
    )
)
