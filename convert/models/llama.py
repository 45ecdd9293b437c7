"""Llama: RMSNorm, RoPE, grouped-query attention, SiLU-gated MLP; optional biases and tied embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turbomill.convert.models.base import Architecture, Fusion, HfConfig, ScaleGroup, register
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

# RoPE variants whose frequencies do not depend on the length of the sequence.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _heads(config: HfConfig) -> tuple[int, int, int]:
    """(Nq, Nkv, D)."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return heads, kv_heads, int(config.get("head_dim") or config["hidden_size"] // heads)


def linear_shapes(config: HfConfig) -> dict[str, tuple[int, int]]:
    """(K, N) of each of a layer's linears."""
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, kv_heads, dim = _heads(config)
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


def scale_groups(config: HfConfig) -> tuple[ScaleGroup, ...]:
    """AWQ's groups (arXiv 2306.00978). Under GQA the query heads of a KV head share o_proj's scale."""
    attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
    return (
        ScaleGroup("input_layernorm", attention, "self_attn"),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj"),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp"),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
    )


def rope(config: HfConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, fp32 [D/2], and the factor on cos and sin; reads both spellings of the scaling."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {key: value for key, value in config.items() if key != "quantization_config"}
    parsed = LlamaConfig(**fields)  # brings rope_theta/rope_scaling to rope_parameters
    parameters: dict[str, Any] = parsed.rope_parameters  # type: ignore[assignment]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        _, _, dim = _heads(config)
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](parsed, torch.device("cpu"))
    return inv_freq.float(), float(factor)


def model_config(config: HfConfig) -> dict[str, Any]:
    """The fields of turbomill._core.ModelConfig."""
    heads, kv_heads, dim = _heads(config)
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": int(config["intermediate_size"]),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_attention_factor": rope(config)[1],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def check(config: HfConfig) -> None:
    """Refuse what this file does not describe: other activations, position-dependent RoPE, odd head sizes."""
    missing = [key for key in REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointError(f"config.json: {', '.join(missing)} missing or not a whole number")
    heads, kv_heads, dim = _heads(config)
    if heads % kv_heads or dim % 2:
        raise UnsupportedModelError(
            f"config.json: {heads} query heads over {kv_heads} key/value heads of {dim}: heads must divide, "
            "head_dim must be even"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"config.json: hidden_act {activation} is not supported; supported: silu")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in STATIC_ROPE:
        raise UnsupportedModelError(
            f"config.json: RoPE type {kind} is not supported; supported: {', '.join(STATIC_ROPE)}"
        )
    if float(scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("config.json: partial_rotary_factor other than 1 is not supported")


LLAMA = register(
    Architecture(
        name="LlamaForCausalLM",
        layer_prefix="model.layers.{i}.",
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        norms={"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        fusions=(
            Fusion("w_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            Fusion("w_o", ("self_attn.o_proj",)),
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
