"""Gemma 2 and Gemma 3 (text): norms around attention and MLP, scaled embeddings, alternating windows.

Their norms multiply by 1 + weight; the store holds the sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from turbomill.convert.models import llama
from turbomill.convert.models.base import HfConfig, ScaleGroup, register
from turbomill.convert.models.hf import check_activation, check_rope, check_sizes, parsed, rope, rope_table
from turbomill.convert.models.llama import LLAMA
from turbomill.convert.models.qwen import HEAD_NORMS
from turbomill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

GELU = ("gelu_pytorch_tanh",)
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}


def _scale_groups(config: HfConfig) -> tuple[ScaleGroup, ...]:
    mlp = ScaleGroup("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp")
    groups = llama.scale_groups(config)
    return (*groups[:2], mlp, groups[3])


def _model_config(config: HfConfig, factor: float) -> dict[str, Any]:
    found: Any = parsed(config)
    softcaps = {
        "attention_softcap": found.attn_logit_softcapping,
        "logit_softcap": found.final_logit_softcapping,
    }
    return {
        **llama.sizes(config),
        "norm_eps": float(found.rms_norm_eps),
        "rope_attention_factor": factor,
        "tie_word_embeddings": GEMMA2.tied(config),
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": float(found.hidden_size) ** 0.5,
        "attention_scale": float(found.query_pre_attn_scalar) ** -0.5,
        **{name: float(cap) for name, cap in softcaps.items() if cap},
        **llama.window_fields(config),
    }


def _model_config2(config: HfConfig) -> dict[str, Any]:
    return _model_config(config, rope(config)[1])


def _check2(config: HfConfig) -> None:
    check_sizes(config)
    check_activation(config, "hidden_activation", GELU)
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("config.json: use_bidirectional_attention is not supported")
    if not isinstance((config.get("rope_parameters") or {}).get("full_attention"), dict):
        check_rope(config)


def _rope3(config: HfConfig, layer_type: str = "full_attention") -> tuple[Tensor, float]:
    found = parsed(config)
    parameters: dict[str, Any] = found.rope_parameters  # type: ignore[assignment]
    return rope_table(found, parameters[layer_type], layer_type=layer_type)


def _local_layers(config: HfConfig) -> list[int]:
    kinds: list[str] = parsed(config).layer_types  # type: ignore[assignment]
    return [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]


def _rope_tables3(config: HfConfig) -> dict[str, Tensor]:
    return {"rope_local": _rope3(config, "sliding_attention")[0]} if _local_layers(config) else {}


def _model_config3(config: HfConfig) -> dict[str, Any]:
    local = _local_layers(config)
    fields = _model_config(config, _rope3(config)[1]) | {"qk_norm": True}
    return fields | ({"local_rope_layers": local} if local else {})


def _check3(config: HfConfig) -> None:
    _check2(config)
    for kind, parameters in parsed(config).rope_parameters.items():  # type: ignore[union-attr]
        check_rope({"rope_parameters": parameters}, ("default", "linear", "llama3"))
        if kind == "sliding_attention" and parameters.get("attention_factor", 1.0) != 1.0:
            raise UnsupportedModelError("config.json: an attention_factor of local layers is not supported")


GEMMA2 = register(
    replace(
        LLAMA,
        name="Gemma2ForCausalLM",
        models="Gemma 2",
        tied_by_default=True,
        norms=NORMS,
        norm_offset=1.0,
        scale_groups=_scale_groups,
        model_config=_model_config2,
        check=_check2,
    )
)

GEMMA3 = register(
    replace(
        GEMMA2,
        name="Gemma3ForCausalLM",
        models="Gemma 3 (text)",
        head_norms=HEAD_NORMS,
        model_config=_model_config3,
        rope=_rope3,
        rope_tables=_rope_tables3,
        check=_check3,
    )
)
