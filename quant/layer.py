"""Quantizing one decoder layer: stage after stage, each calibrated on what the stages before it now give."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from turbomill.convert.models.base import ScaleGroup
from turbomill.quant import awq
from turbomill.quant.correct import corrected
from turbomill.quant.gptq import round_columns
from turbomill.quant.grid import Grid, GridSpec, Quantized, clipped_grid, minmax_grid, searched_grid
from turbomill.quant.inputs import InputStats
from turbomill.quant.loss import output_loss
from turbomill.quant.options import LayerRow, QuantOptions
from turbomill.quant.recipe import Recipe
from turbomill.quant.refine import refine
from turbomill.quant.smooth import fold_into_linear, fold_into_norm, shared_channels

logger = logging.getLogger("turbomill.quant")


@dataclass(frozen=True)
class Stage:
    """Linears that read one activation, and the op before them that can absorb a scale (None: there is
    none)."""

    linears: tuple[str, ...]
    group: ScaleGroup | None


@dataclass
class LayerWork:
    """A layer being quantized: its fp32 module, where quantized linears hold the weights their codes stand
    for."""

    index: int
    module: nn.Module
    spec_of: Callable[[str], GridSpec]  # of a linear of this layer; linears of a stage share one
    head_dim: int
    stored_as: Callable[[str], torch.dtype]  # dtype in the checkpoint of a tensor of this layer
    norm_offset: float = 0.0  # norms multiply by their weight plus this
    done: dict[str, Quantized] = field(default_factory=dict)
    rows: list[LayerRow] = field(default_factory=list)

    def weight(self, name: str) -> Tensor:
        """[N, K] of a linear, or [H] of a norm."""
        return self.module.get_submodule(name).weight.data  # type: ignore[return-value, union-attr]

    def bias(self, name: str) -> Tensor | None:
        """[N] or None."""
        bias = self.module.get_submodule(name).bias
        return None if bias is None else bias.data  # type: ignore[return-value, union-attr]

    def store(self, name: str, quantized: Quantized) -> None:
        """Keep a result and let the module compute with it from now on."""
        self.done[name] = quantized.compact()
        self.module.get_submodule(name).weight.data = quantized.weight()  # type: ignore[union-attr]


def round_weights(work: LayerWork, names: Sequence[str]) -> None:
    """Round every linear to nearest, min to max. Needs no inputs."""
    for name in names:
        start = time.monotonic()
        weight = work.weight(name)
        quantized = _rtn(weight, work.spec_of(name))
        error = _relative(weight, quantized.weight())
        work.store(name, quantized)
        work.rows.append(
            LayerRow(
                *(work.index, name, "rtn", error, None, None, False, time.monotonic() - start),
                scheme=str(work.spec_of(name).scheme),
            )
        )


def quantize_stage(
    work: LayerWork, stage: Stage, stats: InputStats, recipe: Recipe, options: QuantOptions
) -> bool:
    """Quantize the linears of a stage as the recipe says; returns whether a scale was folded into what comes
    before.

    A linear (a stage, where it was scaled as a whole) that comes out worse than rounding to nearest is
    rounded.
    """
    start = time.monotonic()
    # Rows are independent: one run for all linears of the stage.
    weight = torch.cat([work.weight(name) for name in stage.linears])
    if recipe.correct:
        weight = corrected(weight, stats, options.correction_damping)
    spec = work.spec_of(stage.linears[0])
    scale, fold = torch.ones_like(weight[0]), None
    if recipe.scale and stage.group is not None:
        scale, fold = _scale(work, stage.group, weight, stats, spec, options)
    scaled, hessian = weight * scale, stats.gram / scale / scale[:, None]
    if recipe.ranges == "search":
        grid = searched_grid(scaled, hessian.diagonal(), spec)
    else:
        grid = clipped_grid(scaled, hessian, spec)
    if recipe.solve:
        solved = round_columns(scaled, hessian, grid, options.damping)
        if recipe.refine:
            solved = refine(scaled, hessian, solved, recipe.refine, options.damping)
    else:
        solved = Quantized(grid.codes(scaled), grid)
    rounded = _rtn(weight, spec)
    kept = _keep(work, stage, weight, stats, solved, rounded, scale, recipe.name, start)
    if not kept or fold is None:
        return False
    fold()
    return True


def _scale(
    work: LayerWork,
    group: ScaleGroup,
    weight: Tensor,
    stats: InputStats,
    spec: GridSpec,
    options: QuantOptions,
) -> tuple[Tensor, Callable[[], None] | None]:
    """The stage's scale [K], and the action that divides the previous op by it."""
    channels = work.weight(group.previous).shape[0]
    share = shared_channels(weight.shape[1], channels, work.head_dim).to(weight.device)
    found = awq.search_scale(weight, stats, spec, share, options.search_scale)  # [C]
    previous = work.module.get_submodule(group.previous)
    if isinstance(previous, nn.Linear):
        try:
            folded, bias = fold_into_linear(work.done[group.previous], work.bias(group.previous), found)
        except OverflowError:
            return torch.ones_like(weight[0]), None

        def fold() -> None:
            work.store(group.previous, folded)
            if bias is not None:
                previous.bias.data = bias.to(work.stored_as(f"{group.previous}.bias")).float()

        return found[share], fold
    stored_as = work.stored_as(f"{group.previous}.weight")
    divided, applied = fold_into_norm(work.weight(group.previous), found, stored_as, work.norm_offset)

    def fold_norm() -> None:
        previous.weight.data = divided

    return applied[share], fold_norm


def _keep(
    work: LayerWork,
    stage: Stage,
    weight: Tensor,
    stats: InputStats,
    solved: Quantized,
    rounded: Quantized,
    scale: Tensor,
    method: str,
    start: float,
) -> bool:
    """Keep the better of `solved` (in coordinates scaled by `scale`) and `rounded`; returns whether it was
    `solved`.

    A scale belongs to the whole stage, so with one the choice is made for the stage; without one, per linear.
    """
    sizes = [work.weight(name).shape[0] for name in stage.linears]
    whole = bool((scale != 1).any())
    parts = zip(
        stage.linears, weight.split(sizes), _split(solved, sizes), _split(rounded, sizes), strict=True
    )
    judged = []
    for name, part, ours, nearest in parts:
        energy = max(output_loss(part, torch.zeros_like(part), stats.gram), 1e-30)
        loss = output_loss(part, ours.weight() / scale, stats.gram) / energy
        rtn_loss = output_loss(part, nearest.weight(), stats.gram) / energy
        judged.append((name, part, ours, nearest, loss, rtn_loss, energy))
    total = sum(loss * energy for *_, loss, _rtn, energy in judged)
    total_rtn = sum(rtn_loss * energy for *_, rtn_loss, energy in judged)
    seconds = (time.monotonic() - start) / len(judged)
    for name, part, ours, nearest, loss, rtn_loss, _energy in judged:
        # `not <=`: a NaN is worse than anything.
        worse = not (total <= total_rtn) if whole else not (loss <= rtn_loss)
        if worse:
            logger.warning(
                "layer %d %s: %s lost %.3g of the output, rounding to nearest %.3g: rounded to nearest",
                work.index, name, method, loss, rtn_loss,
            )  # fmt: skip
        used = nearest if worse else ours
        error = _relative(part, used.weight() if worse else used.weight() / scale)
        work.store(name, used)
        work.rows.append(
            LayerRow(
                work.index,
                name,
                "rtn" if worse else method,
                error,
                rtn_loss,
                rtn_loss if worse else loss,
                worse,
                seconds,
                stats.tokens,
                str(work.spec_of(name).scheme),
            )
        )
    return not whole or total <= total_rtn


def _rtn(weight: Tensor, spec: GridSpec) -> Quantized:
    grid = minmax_grid(weight, spec)
    return Quantized(grid.codes(weight), grid)


def _split(quantized: Quantized, sizes: list[int]) -> list[Quantized]:
    """A stack of linears, taken apart again."""
    grid = quantized.grid
    parts = zip(quantized.codes.split(sizes), grid.scales.split(sizes), grid.zeros.split(sizes), strict=True)
    return [Quantized(codes, Grid(scales, zeros, grid.spec)) for codes, scales, zeros in parts]


def _relative(weight: Tensor, other: Tensor) -> float:
    return float((weight - other).square().sum() / weight.square().sum().clamp(min=1e-30))
