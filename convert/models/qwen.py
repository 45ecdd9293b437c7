"""Qwen2 and 2.5: biases on q, k and v. Qwen3: a norm on each query and key head instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turbomill.convert.models import llama
from turbomill.convert.models.base import HfConfig, register
from turbomill.convert.models.llama import LLAMA

HEAD_NORMS = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}


def qkv_biases(config: HfConfig) -> dict[str, bool]:
    """q, k and v have one."""
    return {name: name in llama.ATTENTION for name in llama.linear_shapes(config)}


def qk_norm_config(config: HfConfig) -> dict[str, Any]:
    """With head norms and windows."""
    return llama.windowed_config(config) | {"qk_norm": True}


QWEN2 = register(
    replace(
        LLAMA,
        name="Qwen2ForCausalLM",
        models="Qwen1.5, Qwen2, Qwen2.5, QwQ",
        linear_biases=qkv_biases,
        model_config=llama.windowed_config,
    )
)

QWEN3 = register(
    replace(
        LLAMA,
        name="Qwen3ForCausalLM",
        models="Qwen3 (dense)",
        head_norms=HEAD_NORMS,
        model_config=qk_norm_config,
    )
)
