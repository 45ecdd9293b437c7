"""`turbomill verify`: whether a store is whole, equal to its checkpoint, and computes what it should."""

from __future__ import annotations

import asyncio
import logging
from math import prod
from pathlib import Path

import numpy as np
import torch

from turbomill.convert.checkpoint import Checkpoint, open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.convert.runnable import runnable
from turbomill.convert.store import Store, open_store
from turbomill.convert.store.verify import Check, check_chat_template, check_files, check_tensors_against
from turbomill.engine.config import EngineConfig
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError

logger = logging.getLogger("turbomill.reports")

TOKENS = 64  # of the prompt whose logits are compared
# Of the largest logit: fp32 activations agree to 1e-4, those in 16 bits to this.
TOLERANCE = 0.02
MOST_BYTES = 16e9  # of fp32 weights: transformers would need more than that for the other side


def verify(path: str | Path, against: str | None = None, device: str = "auto") -> list[Check]:
    """The checks, in order. Raises CheckpointError when `path` is no readable store at all."""
    store = open_store(path)
    checks = [check_files(store), check_chat_template(store)]
    checkpoint = None if against is None else open_checkpoint(against)
    if checkpoint is not None:
        checks.append(check_tensors_against(store, checkpoint))
    return [*checks, *_check_engine(store, checkpoint, device)]


def _check_engine(store: Store, checkpoint: Checkpoint | None, device: str) -> list[Check]:
    """Which engine loads the store, that its logits are finite, and that they are the checkpoint's."""
    length = min(TOKENS, store.context_length)
    ids = torch.arange(length) * 37 % int(store.model["vocab_size"])
    try:
        config = EngineConfig(session_len=length + 1, max_batch_size=1, device=device)
        with TurbomindEngine(store, config, reason="it is verified") as engine:
            ours = asyncio.run(engine.logits(ids.tolist()))  # [T, V]
    except TurbomillError as error:
        return [Check("engine", False, str(error))]
    if not np.isfinite(ours).all():
        return [Check("engine", False, "turbomind loads it, but its logits are not finite")]
    found = [Check("engine", True, f"turbomind loads it ({device}), logits of {length} tokens are finite")]
    if checkpoint is not None:
        found.append(_check_logits(ours, ids, checkpoint))
    return found


def _check_logits(ours: np.ndarray, ids: torch.Tensor, checkpoint: Checkpoint) -> Check:
    arch, config = checkpoint.arch, checkpoint.config
    shapes = arch.linear_shapes(config)
    weights = sum(prod(shape) for shape in arch.other_weights(config).values())
    for index in range(arch.num_layers(config)):
        weights += sum(prod(shapes[name]) for name in arch.linears_of(config, index))
    if 4 * weights > MOST_BYTES:
        size = f"{4 * weights / 1e9:.0f} GB"
        return Check("logits", True, f"not compared: the reference would take {size} of memory in fp32")
    with torch.inference_mode():
        theirs = load_dense_model(runnable(checkpoint))(input_ids=ids[None]).logits[0].float().numpy()
    if theirs.shape != ours.shape:
        return Check("logits", False, f"the checkpoint has a vocabulary of {theirs.shape[1]}")
    largest = float(np.abs(theirs).max())
    worst = float(np.abs(ours - theirs).max())
    top = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    detail = f"at most {worst:.2g} apart, largest logit {largest:.3g}, same top token {100 * top:.0f} %"
    return Check("logits", worst <= TOLERANCE * max(largest, 1), detail)
