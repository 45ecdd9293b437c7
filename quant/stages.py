"""What of a layer is quantized together, in the order of its forward pass, and how it is calibrated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from turbomill.convert.models.base import Architecture, Fusion, HfConfig, ScaleGroup
from turbomill.errors import TurbomillError
from turbomill.quant.experts import Routed
from turbomill.quant.inputs import InputStats
from turbomill.quant.layer import LayerWork, Stage, quantize_stage, round_weights
from turbomill.quant.options import QuantOptions
from turbomill.quant.recipe import Recipe
from turbomill.quant.stream import Stream

logger = logging.getLogger("turbomill.quant")

FEW_TOKENS = 32  # an expert that fewer calibration tokens chose is rounded: they say nothing about it


@dataclass(frozen=True)
class ExpertsStage:
    """A layer's experts: for each, gate and up, then down. `{e}` in the names is the expert."""

    module: str  # the layer's module that is called with the tokens and the experts chosen for each
    pair: tuple[str, ...]
    down: str
    count: int


def plan_layer(arch: Architecture, config: HfConfig, index: int) -> list[Stage | ExpertsStage]:
    """Layer `index`'s stages."""
    groups = {group.linears: group for group in arch.scale_groups(config)}
    fusions = arch.fusions_of(config, index)
    plan: list[Stage | ExpertsStage] = []
    for fusion in fusions:
        if not fusion.of_experts:
            plan.append(Stage(fusion.parts, groups.get(fusion.parts)))
        elif len(fusion.parts) == 2:
            plan.append(_experts(fusion, fusions, arch.num_experts(config)))
    return plan


def _experts(pair: Fusion, fusions: Sequence[Fusion], count: int) -> ExpertsStage:
    module = pair.parts[0].partition(".{e}")[0]
    (down,) = (f.parts[0] for f in fusions if len(f.parts) == 1 and f.parts[0].startswith(f"{module}."))
    return ExpertsStage(module, pair.parts, down, count)


def calibrate_layer(
    work: LayerWork,
    plan: Sequence[Stage | ExpertsStage],
    streams: Sequence[Stream],
    recipe: Recipe,
    options: QuantOptions,
) -> None:
    """Each stage in turn: gather its inputs behind the stages already quantized, then quantize it.

    `streams` have entered the layer; the first runs through `work.module`.
    """
    for stage in plan:
        if isinstance(stage, ExpertsStage):
            _quantize_experts(work, stage, streams, recipe, options)
            continue
        first = stage.linears[0]
        stats = InputStats(work.weight(first).shape[1], work.weight(first).device)
        for inputs in zip(*(one.inputs(first) for one in streams), strict=True):
            stats.add(*inputs)
        check_inputs(work, first, stats)
        if quantize_stage(work, stage, stats, recipe, options):
            streams[0].forget()  # the scale is now in the values that were attended to


def check_inputs(work: LayerWork, name: str, stats: InputStats) -> None:
    """Raise TurbomillError when calibration gave NaN or inf."""
    if not bool(torch.isfinite(stats.gram.diagonal()).all()):
        raise TurbomillError(
            f"layer {work.index} {name}: its inputs are NaN or inf on the calibration text; the model is "
            "damaged or diverged and cannot be calibrated (lite rtn needs no text)"
        )


def _quantize_experts(
    work: LayerWork, stage: ExpertsStage, streams: Sequence[Stream], recipe: Recipe, options: QuantOptions
) -> None:
    stream, *full = streams
    calls = zip(*(one.calls(stage.module) for one in streams), strict=True)
    routed = Routed([(call[0], call[1], *(other[0] for other in others)) for call, *others in calls])
    few = []
    for expert in range(stage.count):
        tokens = routed.of(expert)  # x [n, H], and perhaps x' [n, H]
        pair = tuple(name.format(e=expert) for name in stage.pair)
        down = stage.down.format(e=expert)
        if len(tokens[0]) < FEW_TOKENS:
            few.append(expert)
            _round(work, (*pair, down), len(tokens[0]))
            continue
        name = f"{stage.module}.{expert}"
        _quantize(work, Stage(pair, None), tokens, recipe, options)
        modules = [one.submodule(name) for one in (stream, *full)]
        inner = tuple(module.gated(x) for module, x in zip(modules, tokens, strict=True))  # [n, I]
        group = ScaleGroup(pair[1], (down,), down)
        _quantize(work, Stage((down,), group), inner, recipe, options)
    if few:
        logger.warning(
            "layer %d: fewer than %d calibration tokens chose experts %s: rounded to nearest, not scaled",
            *(work.index, FEW_TOKENS, ", ".join(map(str, few))),
        )


def _quantize(
    work: LayerWork,
    stage: Stage,
    inputs: tuple[torch.Tensor, ...],
    recipe: Recipe,
    options: QuantOptions,
) -> None:
    stats = InputStats(inputs[0].shape[-1], inputs[0].device)
    stats.add(*inputs)
    check_inputs(work, stage.linears[0], stats)
    quantize_stage(work, stage, stats, recipe, options)


def _round(work: LayerWork, names: tuple[str, ...], tokens: int) -> None:
    round_weights(work, names)
    count = len(names)
    work.rows[-count:] = [replace(row, fallback=True, tokens=tokens) for row in work.rows[-count:]]
