"""Rotary tables that transformers would choose anew in every forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def freeze_longrope(model: PreTrainedModel, session_len: int) -> None:
    """Choose longrope's factors by the length of a session, as the native engine does.

    transformers chooses by the longest text in a forward pass, which would let one sequence of a batch change
    the others, and a text change its own earlier tokens.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        rotary: Any = module
        original = rotary.config.rope_parameters["original_max_position_embeddings"]
        if session_len > original:
            table, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, model.device, seq_len=original + 1)
        else:
            table = rotary.original_inv_freq
        rotary.original_inv_freq = rotary.long_inv_freq = table.to(model.device)
        rotary.inv_freq = rotary.original_inv_freq.clone()
