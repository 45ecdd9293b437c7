"""MODEL as transformers runs it: through this project's readers where they know it, else as it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from turbomill.convert.checkpoint import Checkpoint, open_checkpoint
from turbomill.convert.hf import HfCheckpoint
from turbomill.convert.models.base import find_architecture
from turbomill.convert.reference import attention_implementation, load_dense_model, quiet
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.store import Store, open_store
from turbomill.convert.store.back import StoreCheckpoint
from turbomill.engine.pytorch.device import fitting
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger("turbomill.engine")

CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True)
class Source:
    """An opened MODEL: headers are read, weights are not."""

    checkpoint: Checkpoint
    architecture: str
    config: PretrainedConfig
    known: bool  # to turbomill.convert; else only to transformers
    dtype: torch.dtype  # the model's own
    context_length: int | None  # None: the config does not say

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.checkpoint.path

    @property
    def vocab_size(self) -> int:
        """V, as the config has it."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def scheme(self) -> str | None:
        """Of the weights; None: dense."""
        if not self.known or (scheme := self.checkpoint.scheme) is None:
            return None
        store = _store(self.checkpoint)
        name = store.manifest["scheme"]["format"] if store else self.checkpoint.format.name
        return f"{name} {scheme}"

    def tokenizer(self) -> Any | None:
        """None when the model has none and only token ids can be run."""
        if self.checkpoint.has_tokenizer:
            return self.checkpoint.tokenizer()
        logger.warning("the model has no tokenizer: prompts must be token ids, and there is no text")
        return None

    def load(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """The model in eval mode, its weights dense.

        Raises CheckpointError when some are missing, EngineError when the device has no room for them.
        """
        model = load_dense_model(self.checkpoint, dtype) if self.known else self._load_unknown(dtype)
        self.checkpoint.release()
        if device.type != "cpu":
            nbytes = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
            what = f"{self.path}: holding its weights as {str(dtype).removeprefix('torch.')}"
            lower = (
                "use a smaller model, --device cpu, or --backend turbomind, where packed weights stay packed"
            )
            with fitting(device, nbytes, what, lower):
                model = model.to(device)  # type: ignore[arg-type]
        return model.requires_grad_(False)

    def _load_unknown(self, dtype: torch.dtype) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        # transformers' own choice, but that PyTorch's attention has no soft cap.
        attention = attention_implementation(self.config)
        try:
            with quiet():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    str(self.path),
                    config=self.config,
                    dtype=dtype,
                    attn_implementation=None if attention == "sdpa" else attention,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                )
        except Exception as error:  # transformers raises many types here
            raise CheckpointError(f"{self.path}: transformers cannot load it: {_reason(error)}") from error
        model, info = loaded
        if others := sorted(info["unexpected_keys"]):
            shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            logger.warning(
                "%s: %s has no use for %d tensors: %s", self.path, self.architecture, len(others), shown
            )
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(f"{self.path}: no tensor {', '.join(missing)}")
        return model.eval()


def open_source(model: str | Path | Store | Source) -> Source:
    """Open MODEL and check all but the weights' numbers. Raises CheckpointError, UnsupportedModelError."""
    if isinstance(model, Source):
        return model
    checkpoint = _open(model)
    try:
        architecture = find_architecture(checkpoint.config)
    except UnsupportedModelError:
        return _unknown(checkpoint)
    if not isinstance(checkpoint, StoreCheckpoint):
        _ = checkpoint.format  # raises for one that is not known
    config = checkpoint.hf_config() if architecture.runs_as is None else _runs_as(checkpoint)
    context = int(checkpoint.config.get("max_position_embeddings", 2048))
    return Source(checkpoint, architecture.name, config, True, checkpoint.dtype, context)


def _open(model: str | Path | Store) -> Checkpoint:
    if isinstance(model, Store):
        return StoreCheckpoint(model)
    path = resolve_model(model)
    return StoreCheckpoint(open_store(path)) if kind_of(path) == "store" else open_checkpoint(path)


def _store(checkpoint: Checkpoint) -> Store | None:
    return checkpoint.store if isinstance(checkpoint, StoreCheckpoint) else None


def _runs_as(checkpoint: Checkpoint) -> PretrainedConfig:
    from turbomill.convert.runnable import runnable

    return runnable(checkpoint).hf_config()


def _unknown(checkpoint: Checkpoint) -> Source:
    """One that only transformers has code for. Raises UnsupportedModelError, CheckpointError."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    kind, names = checkpoint.config.get("model_type"), checkpoint.config.get("architectures") or []
    if not isinstance(checkpoint, HfCheckpoint):
        raise UnsupportedModelError(
            f"{checkpoint.path}: {', '.join(names) or kind}: of GGUF files and fp8 checkpoints, backend "
            "pytorch runs the architectures in `turbomill inspect --architectures` alone; others must be "
            "safetensors of 16 or 32 bits"
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{checkpoint.path}: transformers has no code for {', '.join(names) or f'model_type {kind}'}, "
            "and a checkpoint's own code is never run"
        )
    if quantization := checkpoint.config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{checkpoint.path}: {', '.join(names) or kind} with weights in format {method}: backend pytorch "
            "runs quantized checkpoints of the architectures in `turbomill inspect --architectures` alone; "
            "others must be dense"
        )
    try:
        config = AutoConfig.from_pretrained(
            str(checkpoint.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and huggingface_hub raise many types here
        raise CheckpointError(
            f"{checkpoint.path}: config.json is not a valid {kind} config: {_reason(error)}"
        ) from error
    mapping: Any = AutoModelForCausalLM._model_mapping
    runs = mapping[type(config)].__name__ if type(config) in mapping else None
    if runs is None or (names and runs not in names):
        raise UnsupportedModelError(
            f"{checkpoint.path}: {', '.join(names) or kind} is no causal language model of transformers"
            + (f", which has {runs}" if runs else "")
        )
    text = config.get_text_config()
    context = next((int(n) for key in CONTEXT_KEYS if (n := getattr(text, key, None))), None)
    return Source(checkpoint, runs, config, False, _most_common_dtype(checkpoint), context)


def _most_common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """That of most weights."""
    sizes: dict[torch.dtype, int] = {}
    for name in checkpoint.names():
        dtype = checkpoint.dtype_of(name)
        if dtype in (torch.float32, torch.float16, torch.bfloat16):
            sizes[dtype] = sizes.get(dtype, 0) + prod(checkpoint.shape(name))
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
