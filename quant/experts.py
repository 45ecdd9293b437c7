"""Mixtures of experts: transformers stacks the experts' weights, here each is linears of its own, as in the
checkpoint, calibrated on the tokens that the router sends to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Expert(nn.Module):
    """A gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inter: int, act: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False, device="meta")
        self.up_proj = nn.Linear(hidden, inter, bias=False, device="meta")
        self.down_proj = nn.Linear(inter, hidden, bias=False, device="meta")
        self.act = act

    def gated(self, x: Tensor) -> Tensor:
        """What down_proj reads, [T, I]."""
        return self.act(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(x))


class Experts(nn.ModuleList):
    """Takes the place of transformers' stacked experts."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], the experts chosen for each token int64 [T, k] and their weights [T, k]: [T, H]."""
        output = torch.zeros_like(x)
        for index, expert in enumerate(self):
            tokens, place = torch.where(chosen == index)
            if len(tokens):
                output.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return output


def unstack(layer: nn.Module) -> None:
    """Replace stacked experts below `layer` by `Experts`, without weights."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            stacked = getattr(child, "gate_up_proj", None)
            if isinstance(stacked, nn.Parameter) and stacked.dim() == 3:  # [E, 2I, H]
                count, double, hidden = stacked.shape
                act: Any = child.act_fn
                experts = Experts(Expert(hidden, double // 2, act) for _ in range(count))
                setattr(parent, name, experts)


@dataclass
class Routed:
    """What a layer's experts are called with, for all calibration tokens.

    x is as the quantized layers give it; where the recipe corrects for the drift, x' is as the full-precision
    model gives it at the same tokens.
    """

    batches: list[tuple[Tensor, ...]]  # per batch: x [T, H], chosen [T, k], and perhaps x' [T, H]

    def of(self, expert: int) -> tuple[Tensor, ...]:
        """The tokens for which `expert` is chosen, [n, H], and perhaps their x'."""
        parts = [
            tuple(x[(chosen == expert).any(-1)] for x in (inputs, *reference))
            for inputs, chosen, *reference in self.batches
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
