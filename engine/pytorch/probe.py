"""Whether a model runs on the paged attention: tried on a few tokens, beside transformers' own forward.

What a model's code does beside attention (states, convolutions over tokens, masks of its own) is in no config
field that all models share; its logits tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbomill.engine.pytorch.attention import IMPLEMENTATION, attending, paged_attention
from turbomill.engine.pytorch.device import of_device
from turbomill.engine.pytorch.records import Request, Sequence, Slice
from turbomill.engine.pytorch.runner import CACHE_NAMES, Layers, OwnCacheRunner, PagedRunner, Runner
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KNOWN_LAYERS = ("full_attention", "sliding_attention")
BLOCK_LEN = 4
LENGTHS = (12, 7)  # two texts beside each other
# Share of the largest logit that may differ: roundings of the model's dtype, never another computation.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
# In 16 bits a token's experts may be others for a last bit; another computation is wrong on every pair.
PAIRS_16_BIT = 4


class _UnfitError(Exception):
    """Why a model cannot run on the paged attention."""


@dataclass(frozen=True)
class _Trial:
    """Two texts, and transformers' own logits of each [T, V], fp32."""

    texts: list[list[int]]
    expected: list[Tensor]


@dataclass(frozen=True)
class Probe:
    """What was found."""

    layers: Layers | None  # None: it cannot run on the paged attention,
    reason: str  # for this reason
    vocab_size: int
    own_token_bytes: int  # of transformers' cache
    in_pieces: bool = True  # whether a text in it is continued by several tokens at once


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Have the model's code use an attention that transformers knows, or ours."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation == IMPLEMENTATION:
        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)
    model.set_attn_implementation(implementation)


def probe(model: PreTrainedModel, path: Path) -> Probe:
    """Find out, and leave the model, of the checkpoint at `path`, ready for the way that was found.

    Raises CheckpointError for logits that are not finite, UnsupportedModelError when no way is right.
    """
    first, cache = _trial(model, 0)
    if not all(logits.isfinite().all() for logits in first.expected):
        raise CheckpointError(
            f"{path}: its logits are not finite: the weights are damaged, or "
            f"{str(model.dtype).removeprefix('torch.')} cannot hold what they give"
        )
    trials = [first]
    if model.dtype != torch.float32:
        trials += [_trial(model, turn)[0] for turn in range(1, PAIRS_16_BIT)]
    token_bytes = -(-_cache_bytes(cache) // LENGTHS[0])
    layers, reason, before = None, "", model.config._attn_implementation
    try:
        _check_class(model)
        set_attention(model, IMPLEMENTATION)
        layers = _find_layers(model, first.texts[0])
        _compare(model, layers, trials)
    except Exception as error:  # a model's code may raise anything when its attention is another
        if of_device(error):
            raise
        layers, reason = None, " ".join(str(error).split()) or type(error).__name__
        if model.config._attn_implementation == IMPLEMENTATION:
            set_attention(model, before or "eager")
    in_pieces = layers is not None or _check_own(model, path, trials)
    return Probe(layers, reason, first.expected[0].shape[1], token_bytes, in_pieces)


def _trial(model: PreTrainedModel, turn: int) -> tuple[_Trial, Any]:
    """The texts of a turn, and the cache that transformers made for the first of them."""
    embeddings: Any = model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    texts = [[(7919 * i + 101 * length + 31 * turn) % rows for i in range(length)] for length in LENGTHS]
    with torch.inference_mode():
        found = [model(input_ids=torch.tensor([t], device=model.device), use_cache=True) for t in texts]
    cache = next((found[0][name] for name in CACHE_NAMES if found[0].get(name) is not None), None)
    return _Trial(texts, [output.logits[0].float() for output in found]), cache


def _check_class(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise _UnfitError(f"{name} does not use transformers' attention interface")
    config: Any = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if others := sorted({str(kind) for kind in kinds if kind not in KNOWN_LAYERS}):
        raise _UnfitError(f"{name} has layers of {', '.join(others)}")
    if getattr(config, "attention_chunk_size", None):
        raise _UnfitError(f"{name} attends in chunks")


def _find_layers(model: PreTrainedModel, text: list[int]) -> Layers:
    """Which modules attend, with which heads: each of them once in a forward pass."""
    names = {module: name for name, module in model.named_modules()}
    heads: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    windows: list[int | None] = []

    def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if names[module] in heads:
            raise _UnfitError(f"{names[module]} attends more than once in a forward pass")
        if k.shape[1] != q.shape[1]:
            raise _UnfitError(f"{names[module]} attends to {k.shape[1]} keys of {q.shape[1]} tokens")
        heads[names[module]] = (k.shape[0], k.shape[2]), (v.shape[0], v.shape[2])
        windows.append(options["window"])
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(0, 1).contiguous()

    with torch.inference_mode(), attending(record):
        ids = torch.tensor([text], device=model.device)
        model(input_ids=ids, position_ids=torch.arange(len(text), device=model.device)[None], use_cache=False)
    if not heads:
        raise _UnfitError(f"{type(model).__name__} has no attention")
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    if kinds.count("sliding_attention") > sum(window is not None for window in windows):
        raise _UnfitError(f"{type(model).__name__} keeps its sliding windows to itself")
    return Layers(heads)


def _compare(model: PreTrainedModel, layers: Layers, trials: list[_Trial]) -> None:
    """Raise _UnfitError unless the logits are right over a small pool."""
    blocks = 2 * -(-max(LENGTHS) // BLOCK_LEN)
    runner = PagedRunner(model, layers, blocks, BLOCK_LEN, model.dtype)
    runner.allocate()
    if apart := _least_difference(runner, trials):
        raise _UnfitError(
            f"{type(model).__name__} comes out differently on it (by {apart:.2g} of its logits)"
        )


def _check_own(model: PreTrainedModel, path: Path, trials: list[_Trial]) -> bool:
    """Whether the model's code continues texts in pieces. Raises UnsupportedModelError when not by tokens."""
    for in_pieces in (True, False):
        if not _least_difference(OwnCacheRunner(model, in_pieces), trials):
            return in_pieces
    raise UnsupportedModelError(
        f"{path}: transformers' code of {type(model).__name__} does not continue a text from its own cache"
    )


def _least_difference(runner: Runner, trials: list[_Trial]) -> float:
    """Of the pairs of texts: 0 as soon as one comes out right."""
    least = math.inf
    for trial in trials:
        least = min(least, _difference(runner, trial))
        if not least:
            break
    return least


def _difference(runner: Runner, trial: _Trial) -> float:
    """How far a runner's logits are from the right ones, with both texts side by side, one of them in pieces;
    0 when they differ by roundings only."""
    blocks = 2 * -(-max(LENGTHS) // BLOCK_LEN)
    pages, texts = list(range(blocks - 1, -1, -1)), trial.texts
    sequences = [Sequence(i, Request(token_ids=t, max_new_tokens=1), None) for i, t in enumerate(texts)]
    for i, sequence in enumerate(sequences):
        sequence.blocks = pages[i::2]

    def piece(i: int, begin: int, end: int) -> Slice:
        return Slice(sequences[i], begin, texts[i][begin:end], sample=False, all_rows=True)

    assert runner.model is not None
    tolerance = TOLERANCE.get(runner.model.dtype, 0.1)
    first, second = LENGTHS
    steps = (
        [piece(0, 0, 5), piece(1, 0, second - 1)],
        [piece(0, 5, first - 1), piece(1, second - 1, second)],
        [piece(0, first - 1, first)],
    )
    for slices in steps:
        for one, logits in zip(slices, runner.run(slices), strict=True):
            right = trial.expected[one.sequence.id][one.context : one.end]
            apart = (logits - right).abs().max() / right.abs().max().clamp(min=1)
            if not apart <= tolerance:
                return float(apart)
    return 0.0


def _cache_bytes(cache: Any) -> int:
    """Of the tensors in transformers' cache, whatever its layers hold."""
    layers = getattr(cache, "layers", None) or [cache]
    fields = [value for layer in layers for value in getattr(layer, "__dict__", {}).values()]
    tensors = [value for value in fields if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
