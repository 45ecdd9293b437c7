"""Any checkpoint as a transformers model: the reference for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.runnable import runnable
from turbomill.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def attention_implementation(config: PretrainedConfig) -> str:
    """transformers' attention that computes what the model says: PyTorch's own has no soft cap."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def load_dense_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The transformers model in eval mode, every linear dequantized to `dtype`."""
    from transformers import AutoModelForCausalLM

    runs_as = checkpoint.arch.runs_as
    if runs_as is not None and runs_as.arch.name != checkpoint.arch.name:
        checkpoint = runnable(checkpoint)
    config, arch = checkpoint.hf_config(), checkpoint.arch
    state: dict[str, torch.Tensor] = {}
    for prefix in arch.linear_prefixes(checkpoint.config):
        linear = checkpoint.linear(prefix)
        state[f"{prefix}.weight"] = linear.dequantize().to(dtype)
        if linear.bias is not None:
            state[f"{prefix}.bias"] = linear.bias.to(dtype)
    for name in arch.other_weights(checkpoint.config):
        state[name] = checkpoint.exact(name).to(dtype, copy=True)
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[index]
    with quiet():
        # The path None tells transformers that the weights are in `state_dict`.
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attention_implementation(config),
            output_loading_info=True,
        )
    if info["missing_keys"]:
        raise CheckpointError(f"{checkpoint.path}: no tensor {', '.join(sorted(info['missing_keys']))}")
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
