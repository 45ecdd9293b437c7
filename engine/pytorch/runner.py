"""Runs a step of slices through the model, and gives the logits that are wanted.

`PagedRunner` runs all of them at once, as one flat batch over the paged KV cache. `OwnCacheRunner` runs them
one after the other, each with a cache that transformers makes, for models that do more between tokens than
attention: `probe.py` finds out.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from turbomill.engine.pytorch.attention import LayerCache, Step, attend_paged, attending
from turbomill.engine.pytorch.device import fitting
from turbomill.engine.pytorch.records import Slice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Heads = tuple[int, int]  # (Nkv, D)
# What transformers' models call the cache that they take and return; of states, it depends on the version.
CACHE_NAMES = ("cache", "cache_params", "past_key_values")


@dataclass(frozen=True)
class Layers:
    """The modules that attend, by name, with the heads of K and of V."""

    heads: dict[str, tuple[Heads, Heads]]

    @property
    def token_elements(self) -> int:
        """Numbers that one token has in the cache, over all layers."""
        return sum(k[0] * k[1] + v[0] * v[1] for k, v in self.heads.values())


class Runner(ABC):
    """The model on its device. Only the engine thread calls it, once the engine runs."""

    name: str  # of the way it runs, for people

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model: PreTrainedModel | None = model  # None: its memory was given back
        self.device = device
        self._accepted = set(inspect.signature(model.forward).parameters)

    @abstractmethod
    def run(self, slices: Sequence[Slice]) -> list[Tensor]:
        """fp32 logits of each slice, in order: [t, V] of all tokens where wanted, else [1, V] of the last."""

    @abstractmethod
    def allocate(self) -> None:
        """Take the cache's memory. Raises EngineError where there is not so much."""

    @abstractmethod
    def release(self) -> None:
        """Give it back."""

    def _rows(self, piece: Slice) -> int:
        return len(piece.tokens) if piece.all_rows else 1

    def _keep(self, rows: Tensor) -> dict[str, Tensor]:
        """Have the head compute these tokens only, where the model can."""
        return {"logits_to_keep": rows} if "logits_to_keep" in self._accepted else {}

    def _logits(self, found: Tensor, rows: Tensor) -> Tensor:
        """[R, V] fp32 from the model's [1, R or T, V]."""
        return (found[0] if "logits_to_keep" in self._accepted else found[0, rows]).float()


class PagedRunner(Runner):
    """One flat batch a step, over our paged attention."""

    name = "paged attention"

    def __init__(
        self, model: PreTrainedModel, layers: Layers, blocks: int, block_len: int, cache_dtype: torch.dtype
    ) -> None:
        super().__init__(model, model.device)
        self._layers, self._slots, self._block_len = layers, blocks * block_len, block_len
        self._dtype = cache_dtype
        self._caches: dict[nn.Module, LayerCache] = {}

    def allocate(self) -> None:
        assert self.model is not None
        modules = dict(self.model.named_modules())
        nbytes = self._layers.token_elements * (self._slots + 1) * self._dtype.itemsize
        with fitting(self.device, nbytes, "the KV cache", "lower --cache-max-entry-count"):
            self._caches = {
                modules[name]: LayerCache(self._slots, *heads, self._dtype, self.device)
                for name, heads in self._layers.heads.items()
            }

    def release(self) -> None:
        self._caches = {}

    def run(self, slices: Sequence[Slice]) -> list[Tensor]:
        order = sorted(range(len(slices)), key=lambda i: len(slices[i].tokens) > 1)
        batch = [slices[i] for i in order]
        step = Step(batch, self._block_len, self._slots, self.device)
        tokens = [token for piece in batch for token in piece.tokens]
        positions = [at for piece in batch for at in range(piece.context, piece.end)]
        rows, counts, end = [], [], 0
        for piece in batch:
            end += len(piece.tokens)
            counts.append(self._rows(piece))
            rows += range(end - counts[-1], end)
        kept = torch.tensor(rows, device=self.device)
        caches = self._caches

        def attend(module: nn.Module, *states: Tensor, **options: Any) -> Tensor:
            return attend_paged(step, caches[module], *states, **options)

        assert self.model is not None
        with torch.inference_mode(), attending(attend):
            found = self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                **self._keep(kept),
            ).logits
        parts: list[Tensor] = [found] * len(slices)
        for i, part in zip(order, self._logits(found, kept).split(counts), strict=True):
            parts[i] = part
        return parts


class OwnCacheRunner(Runner):
    """One sequence after the other, each with the cache that transformers makes for this model."""

    name = "transformers' own caches, one sequence after the other"

    def __init__(self, model: PreTrainedModel, in_pieces: bool) -> None:
        """`in_pieces`: whether the model's code continues a text by several tokens at once."""
        super().__init__(model, model.device)
        self._in_pieces = in_pieces
        self._cache_name = next((n for n in CACHE_NAMES if n in self._accepted), CACHE_NAMES[-1])

    def allocate(self) -> None:
        pass  # transformers allocates as a sequence grows

    def release(self) -> None:
        pass  # sequences have lost their caches with their blocks

    def run(self, slices: Sequence[Slice]) -> list[Tensor]:
        return [self._run_one(piece) for piece in slices]

    def _run_one(self, piece: Slice) -> Tensor:
        if piece.sequence.state is None or self._in_pieces:
            return self._run_tokens(piece, piece.tokens)[-self._rows(piece) :]
        rows = [self._run_tokens(piece, [token]) for token in piece.tokens]
        return torch.cat(rows[-self._rows(piece) :])

    def _run_tokens(self, piece: Slice, tokens: list[int]) -> Tensor:
        """Continue a sequence; logits [t, V] of the last of the tokens that are wanted."""
        count = len(tokens)
        kept = torch.arange(count - min(count, self._rows(piece)), count, device=self.device)
        state = piece.sequence.state
        given = {} if state is None else {self._cache_name: state}
        assert self.model is not None
        with torch.inference_mode():
            found = self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                use_cache=True,
                **given,
                **self._keep(kept),
            )
        piece.sequence.state = getattr(found, self._cache_name, None)
        return self._logits(found.logits, kept)
