"""RoPE's settings in a GGUF file, as config.json spells them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbomill.convert.gguf.metadata import Metadata
from turbomill.errors import CheckpointError, UnsupportedModelError

LLAMA3, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (LLAMA3, LONG, SHORT)  # tensors: divisors of the inverse frequencies, [D_rot/2]


def rope_parameters(meta: Metadata, factors: dict[str, Tensor]) -> dict[str, Any]:
    """`rope_parameters`; a partial rotation is in them. Raises UnsupportedModelError for other scalings."""
    theta, dim = meta.real("rope.freq_base", 10000.0), meta.heads[2]
    rotated = meta.whole("rope.dimension_count", dim)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotated != dim:
        found["partial_rotary_factor"] = rotated / dim
    if LONG in factors or SHORT in factors:
        return found | _longrope(meta, factors)
    if LLAMA3 in factors:
        return _llama3(meta, theta, dim, factors[LLAMA3])
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor")
    if kind == "none" or (kind == "linear" and factor is None):
        return found
    if kind == "linear":
        return found | {"rope_type": "linear", "factor": meta.real("rope.scaling.factor")}
    odd = [key for key in meta.fields if key.startswith(f"{meta.arch}.rope.scaling.yarn_")]
    if kind == "yarn" and not odd:
        original = meta.whole("rope.scaling.original_context_length")
        factor = meta.real("rope.scaling.factor")
        return found | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UnsupportedModelError(
        f"{meta.path}: {odd[0] if odd else f'{meta.arch}.rope.scaling.type {kind}'}: only none, linear, "
        "plain yarn, Llama-3's and longrope are supported"
    )


def _longrope(meta: Metadata, factors: dict[str, Tensor]) -> dict[str, Any]:
    if LONG not in factors or SHORT not in factors:
        raise CheckpointError(f"{meta.path}: {LONG} and {SHORT} must both be there")
    return {
        "rope_type": "longrope",
        "short_factor": factors[SHORT].tolist(),
        "long_factor": factors[LONG].tolist(),
        "original_max_position_embeddings": meta.whole("rope.scaling.original_context_length"),
    }


def _llama3(meta: Metadata, theta: float, dim: int, factors: Tensor) -> dict[str, Any]:
    """The parameters that Llama-3 models were released with, if they give this file's factors."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, rope_parameters=dict(found))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-torch.arange(0, dim, 2).float() / dim)
    if scaled.shape != factors.shape or not torch.allclose(plain / scaled, factors, rtol=1e-4):
        raise UnsupportedModelError(
            f"{meta.path}: {LLAMA3} does not follow Llama-3's scaling (low 1, high 4, length 8192)"
        )
    return found
