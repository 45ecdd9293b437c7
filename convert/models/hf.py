"""What several architectures read from config.json, through transformers' own config classes.

They know both spellings of the RoPE settings and the defaults of keys that a config leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from turbomill.convert.models.base import HfConfig
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

# RoPE variants whose frequencies do not depend on the length of the sequence. `dynamic` changes them only
# beyond max_position_embeddings, which is as long as a session can be.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "dynamic")
SILU = ("silu", "swish")
# More than any model has: beyond, a config is damaged, and would cost memory and time without end.
MOST = {"num_hidden_layers": 4096, "head_dim": 1 << 16, "vocab_size": 1 << 28}
MOST_OTHERS = 1 << 24
OPTIONAL = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window_pattern"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


# Their config.json is read as Llama's, whose keys it has: transformers either does not know these models or
# knows fewer variants of them.
READ_AS_LLAMA = ("internlm2", "internlm3", "baichuan")


def heads_of(config: HfConfig) -> tuple[int, int, int]:
    """(Nq, Nkv, D)."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return heads, kv_heads, int(config.get("head_dim") or config["hidden_size"] // heads)


def parsed(config: HfConfig) -> PretrainedConfig:
    """The transformers config; Llama's for a model_type that transformers does not have."""
    from transformers import CONFIG_MAPPING, LlamaConfig

    skipped = ("quantization_config", "model_type")
    fields = {key: value for key, value in config.items() if key not in skipped}
    kind = str(config.get("model_type"))
    known = kind in CONFIG_MAPPING and kind not in READ_AS_LLAMA
    try:
        return (CONFIG_MAPPING[kind] if known else LlamaConfig)(**fields)
    except Exception as error:  # transformers and huggingface_hub raise many types here
        reason = str(error).strip().replace("\n", " ")
        raise CheckpointError(f"config.json is not a valid {kind} config: {reason}") from error


def rope(config: HfConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, fp32 [D_rot/2], and the factor on cos and sin."""
    found = parsed(config)
    return rope_table(found, found.rope_parameters)  # type: ignore[arg-type]


def rope_table(found: PretrainedConfig, parameters: dict[str, Any], **choice: Any) -> tuple[Tensor, float]:
    """The table of one set of RoPE parameters; `choice` goes to transformers' function for scaled ones."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = parameters.get("rope_type", "default")
    if kind in ("default", "dynamic"):
        _, _, dim = heads_of(found.to_dict())
        dim = int(dim * parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    try:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](found, torch.device("cpu"), **choice)
    except KeyError as error:
        raise CheckpointError(f"config.json: RoPE type {kind} needs {error.args[0]}") from error
    return inv_freq.float(), float(factor)


def rotary_fields(config: HfConfig) -> dict[str, Any]:
    """`rotary_dim`, when RoPE rotates a part of each head only."""
    _, _, dim = heads_of(config)
    rotary = 2 * rope(config)[0].numel()
    return {} if rotary == dim else {"rotary_dim": rotary}


def window_fields(config: HfConfig) -> dict[str, Any]:
    """`layer_windows`, unless every layer sees the whole context."""
    found = parsed(config)
    window = int(getattr(found, "sliding_window", None) or 0)
    kinds = getattr(found, "layer_types", None) or ["sliding_attention"] * int(config["num_hidden_layers"])
    if window == 0 or window >= int(getattr(found, "max_position_embeddings", 0) or window + 1):
        return {}
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    return {"layer_windows": windows} if any(windows) else {}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_sizes(config: HfConfig) -> None:
    """Refuse missing sizes and odd heads."""
    missing = [key for key in REQUIRED if not _is_size(config.get(key))]
    if missing:
        raise CheckpointError(f"config.json: {', '.join(missing)} missing or not a positive whole number")
    for key in (*REQUIRED, *OPTIONAL):
        value, most = config.get(key), MOST.get(key, MOST_OTHERS)
        if value is not None and (not _is_size(value) or value > most):
            raise CheckpointError(f"config.json: {key} is {value!r}, expected a whole number up to {most}")
    heads, kv_heads, dim = heads_of(config)
    if heads % kv_heads or dim % 2:
        raise UnsupportedModelError(
            f"config.json: {heads} query heads over {kv_heads} key/value heads of {dim}: heads must divide, "
            "head_dim must be even"
        )


def check_activation(config: HfConfig, key: str = "hidden_act", known: Sequence[str] = SILU) -> None:
    """Refuse an activation other than the model's."""
    activation = config.get(key) or known[0]
    if activation not in known:
        raise UnsupportedModelError(
            f"config.json: {key} {activation} is not supported; supported: {known[0]}"
        )


def check_rope(config: HfConfig, known: Sequence[str] = STATIC_ROPE, partial: bool = False) -> None:
    """Refuse RoPE whose frequencies depend on the position, and a partial one where the model has none."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in known:
        raise UnsupportedModelError(
            f"config.json: RoPE type {kind} is not supported; supported: {', '.join(known)}"
        )
    factor = float(scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if factor != 1.0 and not partial:
        raise UnsupportedModelError("config.json: partial_rotary_factor other than 1 is not supported")
