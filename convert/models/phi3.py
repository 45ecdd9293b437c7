"""Phi-3: q, k, v in one linear, gate and up in another; RoPE with factors for short and for long contexts.

A longrope model rotates sequences beyond `original_max_position_embeddings` with other frequencies. Keys in a
cache cannot be rotated anew, so the store holds both tables and a session uses one throughout, chosen by
the longest sequence it may hold (session_len).
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
    parsed,
    rope_table,
    rotary_fields,
)
from turbomill.convert.models.llama import LLAMA
from turbomill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

LONGROPE = ("longrope", "su")  # the second is the older spelling


def halves_interleaved(config: HfConfig) -> Tensor:
    """Rows of a checkpoint's [gate|up] linear in the store's order, in blocks of 8."""
    import torch

    inter = int(config["intermediate_size"])
    if inter % 8:
        raise UnsupportedModelError(
            f"config.json: intermediate_size {inter} is not a multiple of 8, which the fused SiLU needs"
        )
    return torch.arange(2 * inter).reshape(2, inter // 8, 8).transpose(0, 1).flatten()


def _shapes(config: HfConfig) -> dict[str, tuple[int, int]]:
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, kv_heads, dim = heads_of(config)
    return {
        "self_attn.qkv_proj": (hidden, (heads + 2 * kv_heads) * dim),
        "self_attn.o_proj": (heads * dim, hidden),
        "mlp.gate_up_proj": (hidden, 2 * inter),
        "mlp.down_proj": (inter, hidden),
    }


def _biases(config: HfConfig) -> dict[str, bool]:
    return dict.fromkeys(_shapes(config), False)


def _scale_groups(_config: HfConfig) -> tuple[ScaleGroup, ...]:
    """o_proj and down_proj have none: what feeds them is a part of a fused linear."""
    return (
        ScaleGroup("input_layernorm", ("self_attn.qkv_proj",), "self_attn"),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_up_proj",), "mlp"),
    )


def _long_context(config: HfConfig) -> int:
    """The length beyond which sequences use the long factors; 0 when none may."""
    found = parsed(config)
    parameters: dict[str, Any] = found.rope_parameters  # type: ignore[assignment]
    if parameters.get("rope_type") != "longrope":
        return 0
    original = int(parameters["original_max_position_embeddings"])
    return original if found.max_position_embeddings > original else 0


def _rope_tables(config: HfConfig) -> dict[str, Tensor]:
    found, original = parsed(config), _long_context(config)
    if not original:
        return {}
    parameters: dict[str, Any] = found.rope_parameters  # type: ignore[assignment]
    return {"rope_long": rope_table(found, parameters, seq_len=original + 1)[0]}


def _model_config(config: HfConfig) -> dict[str, Any]:
    original = _long_context(config)
    long = {"rope_original_context": original} if original else {}
    return llama.windowed_config(config) | rotary_fields(config) | long


def _check(config: HfConfig) -> None:
    check_sizes(config)
    check_activation(config)
    check_rope(config, ("default", *LONGROPE), partial=True)


PHI3 = register(
    replace(
        LLAMA,
        name="Phi3ForCausalLM",
        models="Phi-3, Phi-3.5, Phi-4 (text); longrope",
        fusions=(
            Fusion("w_qkv", ("self_attn.qkv_proj",)),
            Fusion("w_o", ("self_attn.o_proj",)),
            Fusion("w_gate_up", ("mlp.gate_up_proj",), order=halves_interleaved),
            Fusion("w_down", ("mlp.down_proj",)),
        ),
        linear_shapes=_shapes,
        linear_biases=_biases,
        scale_groups=_scale_groups,
        model_config=_model_config,
        rope_tables=_rope_tables,
        check=_check,
    )
)
