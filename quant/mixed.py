"""Mixed precision for one model: what each linear's rounding costs, and the schemes that fit the budget."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from turbomill.convert.linear import QuantScheme
from turbomill.convert.runnable import RunnableCheckpoint
from turbomill.quant.budget import Unit, allocate, candidates
from turbomill.quant.decoder import StreamedDecoder
from turbomill.quant.grid import GridSpec
from turbomill.quant.options import QuantOptions
from turbomill.quant.sensitivity import sensitivities

logger = logging.getLogger("turbomill.quant")

# Each window is one sample of the Fisher information: many short ones.
WINDOWS, LENGTH = 96, 64
TOGETHER = 16


@dataclass(frozen=True)
class Allocation:
    """The scheme of each decoder linear, by its full name in the code that runs the model."""

    schemes: dict[str, QuantScheme]
    bits_per_weight: float  # scales and zeros counted
    kl: float  # predicted for rounding to nearest, nats per token

    def describe(self) -> dict[str, object]:
        """What provenance records."""
        counts = Counter(map(str, self.schemes.values()))
        return {"bits_per_weight": round(self.bits_per_weight, 4), "linears": dict(sorted(counts.items()))}


def mixed_schemes(
    model: RunnableCheckpoint,
    windows: Tensor,
    options: QuantOptions,
    dtype: torch.dtype,
    device: torch.device,
) -> Allocation:
    """Measure on ids int64 [n, T], then choose; linears that the store fuses get one scheme."""
    arch, config = model.arch, model.config
    shapes, experts = arch.linear_shapes(config), arch.num_experts(config)

    def units(index: int) -> list[tuple[str, ...]]:
        return [
            tuple(
                name for expert in range(experts if fusion.of_experts else 1) for name in fusion.names(expert)
            )
            for fusion in arch.fusions_of(config, index)
        ]

    layers = range(arch.num_layers(config))
    used = {name for index in layers for unit in units(index) for name in unit}
    schemes = candidates(options.scheme, [shapes[name][0] for name in used], options.budget)
    decoder = StreamedDecoder(model, device)
    measured = sensitivities(
        decoder,
        short_windows(windows).split(TOGETHER),
        units,
        schemes,
        lambda scheme: GridSpec(scheme, dtype),
        options.seed,
    )
    choices: list[Unit] = []
    for index, layer in enumerate(measured):
        for names, losses in zip(units(index), layer, strict=True):
            weights = sum(shapes[name][0] * shapes[name][1] for name in names)
            choices.append(Unit(f"{index} {names[0]}", weights, losses))
    chosen = allocate(choices, options.budget)
    found = {
        arch.layer(index) + name: chosen[f"{index} {names[0]}"]
        for index in layers
        for names in units(index)
        for name in names
    }
    total = sum(unit.weights for unit in choices)
    allocation = Allocation(
        found,
        sum(unit.bits(chosen[unit.name]) for unit in choices) / total,
        sum(unit.losses[chosen[unit.name]] for unit in choices),
    )
    logger.info("--budget %g: %s", options.budget, allocation.describe())
    return allocation


def short_windows(ids: Tensor) -> Tensor:
    """Pieces of the windows [n, T], at most WINDOWS of LENGTH tokens, evenly spread over them."""
    length = min(LENGTH, ids.shape[1])
    pieces = ids[:, : ids.shape[1] // length * length].reshape(-1, length)
    step = max(1, len(pieces) // WINDOWS)
    return pieces[::step][:WINDOWS]
