"""GLM-4: RoPE on half of each head, rotating neighbouring dimensions; since 0414 more norms.

The engine rotates dimension i with i + D_rot/2: the rows of q and k are brought to that order, which leaves
q . k as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from turbomill.convert.models import llama
from turbomill.convert.models.base import Fusion, HfConfig, ScaleGroup, register
from turbomill.convert.models.hf import (
    check_activation,
    check_rope,
    check_sizes,
    heads_of,
    rope,
    rotary_fields,
)
from turbomill.convert.models.llama import LLAMA
from turbomill.convert.models.phi3 import halves_interleaved

if TYPE_CHECKING:
    from torch import Tensor


def _halves_first(config: HfConfig) -> Tensor:
    """Rows of [Q|K|V] whose rotated dimensions of q and k are the even ones, then the odd ones."""
    import torch

    heads, kv_heads, dim = heads_of(config)
    rotary = 2 * rope(config)[0].numel()
    rows = torch.arange((heads + 2 * kv_heads) * dim).reshape(-1, dim)
    turned = torch.cat([rows[:, :rotary:2], rows[:, 1:rotary:2], rows[:, rotary:]], 1)
    rows[: heads + kv_heads] = turned[: heads + kv_heads]
    return rows.flatten()


def _shapes(config: HfConfig) -> dict[str, tuple[int, int]]:
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    attention = {
        name: shape for name, shape in llama.linear_shapes(config).items() if name.startswith("self_attn")
    }
    return {**attention, "mlp.gate_up_proj": (hidden, 2 * inter), "mlp.down_proj": (inter, hidden)}


def _biases(config: HfConfig) -> dict[str, bool]:
    attention = bool(config.get("attention_bias"))
    return {name: attention and name in llama.ATTENTION for name in _shapes(config)}


def _scale_groups(config: HfConfig) -> tuple[ScaleGroup, ...]:
    return (
        *llama.attention_scale_groups(config),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_up_proj",), "mlp"),
    )


def _model_config(config: HfConfig) -> dict[str, Any]:
    return llama.model_config(config) | rotary_fields(config)


def _post_norms_config(config: HfConfig) -> dict[str, Any]:
    return _model_config(config) | {"post_norms": True}


def _check(config: HfConfig) -> None:
    check_sizes(config)
    check_activation(config)
    check_rope(config, partial=True)


GLM = register(
    replace(
        LLAMA,
        name="GlmForCausalLM",
        models="GLM-4 9B (in transformers' format)",
        fusions=(
            Fusion("w_qkv", llama.ATTENTION, order=_halves_first),
            Fusion("w_o", ("self_attn.o_proj",)),
            Fusion("w_gate_up", ("mlp.gate_up_proj",), order=halves_interleaved),
            Fusion("w_down", ("mlp.down_proj",)),
        ),
        linear_shapes=_shapes,
        linear_biases=_biases,
        scale_groups=_scale_groups,
        model_config=_model_config,
        check=_check,
    )
)

GLM4 = register(
    replace(
        GLM,
        name="Glm4ForCausalLM",
        models="GLM-4 0414, GLM-Z1",
        norms={
            "input_layernorm": "attention_norm",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffn_norm",
        },
        model_config=_post_norms_config,
    )
)
