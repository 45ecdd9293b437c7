"""Text a model writes by itself: calibration data when there is no data (LLM-QAT, Liu et al. 2023)."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from turbomill import console

logger = logging.getLogger("turbomill.calib_data")


# A model left to itself soon drifts into a few kinds of text, and what it never writes stays uncalibrated. A
# short opening of real text puts each piece back among many; what fills the piece is still the model's own.
OPENING, PIECE = 24, 128  # tokens


@torch.inference_mode()
def sample_ids(
    model: Any,
    n: int,
    length: int,
    seed: int = 0,
    batch_size: int = 32,
    openings: Tensor | None = None,
) -> Tensor:
    """Sample `n` sequences of `length` tokens at temperature 1 from a transformers causal LM, with its KV
    cache.

    With `openings`, int64 [m, o], a sequence is made of pieces of PIECE tokens, each of which starts with the
    next of the openings, in turn. Without, each is one piece that starts from one random ordinary token (so
    that sequences differ), after BOS where the model has one. Sampling goes on past EOS: the next document is
    also text. The same seed gives the same ids. Returns int64 [n, length].
    """
    generator = torch.Generator().manual_seed(seed)
    if openings is None:
        prefix, piece = _random_starts(model, n, generator), length
    else:
        piece = min(PIECE, length)
        pieces = n * -(-length // piece)
        prefix = openings[torch.arange(pieces) % len(openings)]  # [pieces, o]
    parts = [_sample_batch(model, batch, piece, generator) for batch in prefix.split(batch_size)]
    return torch.cat(parts).reshape(n, -1)[:, :length]


def _random_starts(model: Any, n: int, generator: torch.Generator) -> Tensor:
    vocab = model.config.get_text_config().vocab_size
    special = {t for t in _special_ids(model) if t is not None}
    starts = torch.randint(0, vocab, (n * 4,), generator=generator).tolist()
    starts = torch.tensor(([t for t in starts if t not in special] + starts)[:n])
    bos = model.config.get_text_config().bos_token_id
    return starts[:, None] if bos is None else torch.stack([torch.full_like(starts, bos), starts], dim=1)


def _sample_batch(model: Any, prefix: Tensor, length: int, generator: torch.Generator) -> Tensor:
    from transformers import DynamicCache

    ids = prefix[:, :length].to(model.device)  # [B, o]
    cache, step = DynamicCache(config=model.config), ids
    # transformers 5.24 renamed the argument, and warns about the old name.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with console.progress("self-sampled text", max(length - ids.shape[1], 0)) as task:
        while ids.shape[1] < length:
            output = model(input_ids=step, use_cache=True, **{name: cache})
            logits = output.logits[:, -1].float()  # [B, V]
            # Drawn on the CPU: the same seed gives the same text wherever the model runs.
            step = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(ids.device)
            ids = torch.cat([ids, step], dim=1)
            task.advance()
    return ids.cpu()


def _special_ids(model: Any) -> list[int | None]:
    config = model.config.get_text_config()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [config.bos_token_id, config.pad_token_id, *ends]
