"""Paged attention for transformers' modelling code: K and V go to pages, queries attend through block tables.

A model calls `paged_attention`, registered as an attention implementation of transformers, with the flat
batch of a step [1, T]; which of its tokens belong to which sequence is in the `Step` that the thread runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbomill.engine.pytorch.records import Slice
from turbomill.errors import UnsupportedModelError

IMPLEMENTATION = "turbomill_paged"


class LayerCache:
    """One layer's keys and values by slot: slot page * P + offset; the last one is zero for ever.

    Padding reads the zero slot: what other slots hold may be anything, and 0 * NaN is NaN.
    """

    def __init__(
        self, slots: int, k_heads: tuple[int, int], v_heads: tuple[int, int], dtype: torch.dtype, device: Any
    ) -> None:
        """`k_heads`, `v_heads`: (Nkv, D) of K and of V."""
        self.keys = torch.empty((slots + 1, *k_heads), dtype=dtype, device=device)  # [S + 1, Nkv, D]
        self.values = torch.empty((slots + 1, *v_heads), dtype=dtype, device=device)
        self.keys[slots] = self.values[slots] = 0


@dataclass(frozen=True)
class Part:
    """Sequences that attend together, with `length` queries each: one prompt, or every decode of a step."""

    first: int  # of the part's tokens in the flat batch
    count: int  # B
    length: int  # C
    slots: Tensor  # int64 [B, L]: where each sequence's keys are, from the oldest that a query sees
    seen: Tensor  # bool [B, C, L]: which of them a query sees


class Step:
    """One step's flat batch: decodes first, then prompts."""

    def __init__(self, slices: Sequence[Slice], block_len: int, zero_slot: int, device: torch.device) -> None:
        self._slices, self._block_len, self._zero, self._device = slices, block_len, zero_slot, device
        self._decodes = sum(len(piece.tokens) == 1 for piece in slices)
        assert all(len(piece.tokens) == 1 for piece in slices[: self._decodes])
        self.new_slots = torch.cat([self._slots(p, p.context, p.end) for p in slices]).to(device)  # [T]
        self._parts: dict[int | None, list[Part]] = {}  # by sliding window

    def _slots(self, piece: Slice, begin: int, end: int) -> Tensor:
        at = torch.arange(begin, end)
        blocks = torch.tensor(piece.sequence.blocks)
        return blocks[at // self._block_len] * self._block_len + at % self._block_len

    def parts(self, window: int | None) -> list[Part]:
        """The batch as its sequences attend; within `window` a query sees itself and what is just before."""
        if window not in self._parts:
            groups = [self._slices[: self._decodes]] if self._decodes else []
            groups += [[piece] for piece in self._slices[self._decodes :]]
            first, parts = 0, []
            for group in groups:
                parts.append(self._part(group, first, window))
                first += len(group) * len(group[0].tokens)
            self._parts[window] = parts
        return self._parts[window]

    def _part(self, group: Sequence[Slice], first: int, window: int | None) -> Part:
        length = len(group[0].tokens)
        begins = [0 if window is None else max(0, piece.context - window + 1) for piece in group]
        longest = max(piece.end - begin for piece, begin in zip(group, begins, strict=True))
        slots = torch.full((len(group), longest), self._zero)
        for row, piece, begin in zip(slots, group, begins, strict=True):
            row[: piece.end - begin] = self._slots(piece, begin, piece.end)
        keys = torch.tensor(begins)[:, None] + torch.arange(longest)  # positions [B, L]
        queries = torch.tensor([piece.context for piece in group])[:, None] + torch.arange(length)  # [B, C]
        seen = keys[:, None, :] <= queries[:, :, None]
        if window is not None:
            seen &= keys[:, None, :] > queries[:, :, None] - window
        return Part(first, len(group), length, slots.to(self._device), seen.to(self._device))


class _Running(threading.local):
    attend: Any = None


_running = _Running()


@contextmanager
def attending(attend: Any) -> Iterator[None]:
    """While it lasts, this thread's `paged_attention` is `attend(module, query, key, value, **options)`."""
    _running.attend = attend
    try:
        yield
    finally:
        _running.attend = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call: q [1, Nq, T, D], k and v [1, Nkv, T, D] -> [1, T, Nq, D].

    `sliding_window`, `softcap` and `s_aux` (sinks [Nq]) are the model's. Raises UnsupportedModelError for a
    mask or a bias of the model's own.
    """
    if attention_mask is not None or is_causal is False or position_bias is not None:
        raise UnsupportedModelError("attention with a mask or a bias of its own")
    options = {"scaling": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    return _running.attend(module, query[0], key[0], value[0], **options)[None], None


def attend_paged(
    step: Step,
    cache: LayerCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Writes k and v [Nkv, T, D] into the cache, and returns what q [Nq, T, D] attends to: [T, Nq, Dv]."""
    cache.keys[step.new_slots] = key.transpose(0, 1).to(cache.keys.dtype)
    cache.values[step.new_slots] = value.transpose(0, 1).to(cache.values.dtype)
    heads, tokens, dim = query.shape
    kv_heads, v_dim = value.shape[0], value.shape[2]
    group = heads // kv_heads  # query heads that share a KV head: their queries are rows of one product
    scale = dim**-0.5 if scaling is None else scaling
    out = query.new_empty((tokens, heads, v_dim))
    for part in step.parts(window):
        b, c, end = part.count, part.length, part.first + part.count * part.length
        q = query[:, part.first : end].view(kv_heads, group, b, c, dim).permute(2, 0, 1, 3, 4)
        q = q.reshape(b, kv_heads, group * c, dim)
        k = cache.keys[part.slots].to(query.dtype).transpose(1, 2)  # [B, Nkv, L, D]
        v = cache.values[part.slots].to(query.dtype).transpose(1, 2)
        seen = part.seen[:, None].expand(b, group, c, -1).reshape(b, 1, group * c, -1)
        if softcap is None and sinks is None:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        else:
            rows = None if sinks is None else sinks.view(kv_heads, group, 1).expand(-1, -1, c)
            found = _attend(q, k, v, seen, scale, softcap, rows)
        found = found.view(b, kv_heads, group, c, v_dim).permute(0, 3, 1, 2, 4)  # [B, C, Nkv, group, Dv]
        out[part.first : end] = found.reshape(b * c, heads, v_dim)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention [B, Nkv, R, Dv] with capped scores; a sink is a score without a value. Softmax in fp32."""
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    column = sinks.reshape(1, q.shape[1], q.shape[2], 1).float().expand(q.shape[0], -1, -1, -1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(v.dtype) @ v
