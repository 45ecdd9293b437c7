"""Quantization grids: a scale and a zero per group of K, and the codes that fall on them.

Here a weight is [N, K] as in a checkpoint; a grid's tensors are [N, G], G = K / group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.quant.parallel import spread


@dataclass(frozen=True)
class GridSpec:
    """What a grid may be: the scheme, the 16-bit dtype that will store its scales, and the smallest zero.

    GPTQ v1 stores zero - 1, which readers disagree about for a zero of 0: there `min_zero` is 1.
    """

    scheme: QuantScheme
    dtype: torch.dtype
    min_zero: int = 0

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.scheme.bits - 1


@dataclass(frozen=True)
class Grid:
    """Scales and zeros of one linear. Scales are fp32 but hold numbers of the checkpoint's 16-bit dtype
    exactly."""

    scales: Tensor  # fp32 [N, G]
    zeros: Tensor  # fp32 [N, G], integers
    spec: GridSpec

    def codes(self, weight: Tensor) -> Tensor:
        """Nearest codes, fp32 [N, K] holding integers 0..top."""
        scaled = _grouped(weight, self.spec) / self.scales[..., None]
        return scaled.round_().add_(self.zeros[..., None]).clamp_(0, self.spec.top).reshape(weight.shape)

    def decode(self, codes: Tensor) -> Tensor:
        """The weights that codes [N, K] stand for, fp32 [N, K]."""
        centred = _grouped(codes, self.spec) - self.zeros[..., None]
        return centred.mul_(self.scales[..., None]).reshape(codes.shape)

    def round(self, weight: Tensor) -> Tensor:
        """The nearest weights on the grid, fp32 [N, K]."""
        return self.decode(self.codes(weight))


@dataclass(frozen=True)
class Quantized:
    """A linear's codes on its grid."""

    codes: Tensor  # fp32 or uint8 [N, K]
    grid: Grid

    def weight(self) -> Tensor:
        """fp32 [N, K]."""
        return self.grid.decode(self.codes.float())

    def compact(self) -> Quantized:
        """The same with a byte a code."""
        return Quantized(self.codes.to(torch.uint8), self.grid)

    def linear(self, bias: Tensor | None) -> QuantLinear:
        """The canonical form on the CPU, scales in the spec's dtype."""
        spec = self.grid.spec
        return QuantLinear(
            codes=self.codes.to(torch.uint8).T.contiguous().cpu(),
            scales=self.grid.scales.to(spec.dtype).T.contiguous().cpu(),
            zeros=self.grid.zeros.to(torch.uint8).T.contiguous().cpu(),
            scheme=spec.scheme,
            bias=None if bias is None else bias.cpu(),
        )


def _grouped(weight: Tensor, spec: GridSpec) -> Tensor:
    """[N, K] as [N, G, group]."""
    n, k = weight.shape
    return weight.reshape(n, k // spec.scheme.group, spec.scheme.group)


def range_of(weight: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Each group's lowest and highest weight, widened to hold 0 (which must be exact): two [N, G]."""
    low, high = _grouped(weight, spec).aminmax(dim=-1)
    return low.clamp(max=0), high.clamp(min=0)


def range_grid(low: Tensor, high: Tensor, spec: GridSpec) -> Grid:
    """The grid that spans [low, high] ([N, G] each), low <= 0 <= high.

    The scale is rounded to the 16-bit dtype here, before any code is chosen, so that the checkpoint decodes
    to what was meant. A group of zeros gets scale 1; a scale too small for the dtype gets its smallest
    number, never 0.
    """
    if spec.scheme.symmetric:
        span = 2 * torch.maximum(-low, high)
    else:
        span = high - low
    scales = (span / spec.top).to(spec.dtype).float()
    tiny = torch.finfo(spec.dtype).smallest_normal
    if spec.dtype == torch.float16:
        tiny = 2.0**-24  # fp16 readers keep subnormals; losing them would lose whole groups
    scales = torch.where(span == 0, 1.0, scales.clamp(min=tiny))
    if spec.scheme.symmetric:
        zeros = torch.full_like(scales, (spec.top + 1) / 2)
    else:
        zeros = (-low / scales).round().clamp(spec.min_zero, spec.top)
    return Grid(scales, zeros, spec)


def minmax_grid(weight: Tensor, spec: GridSpec) -> Grid:
    """The grid that spans each group of weight [N, K] from its least to its greatest."""
    return range_grid(*range_of(weight, spec), spec)


def searched_grid(
    weight: Tensor, importance: Tensor, spec: GridSpec, steps: int = 20, smallest: float = 0.5
) -> Grid:
    """Shrink each group's range to the one of `steps` factors, 1 down to `smallest`, that errs least.

    `importance` [K] weights the squared errors: E[x^2] of the input channels, the diagonal of the Hessian.
    """
    weights = importance.reshape(-1, spec.scheme.group)  # [G, group]

    def error(delta: Tensor) -> Tensor:  # [n, G, group] -> [n, G]
        return delta.square().mul_(weights).sum(-1)

    return _search(weight, error, spec, steps, smallest)


def clipped_grid(
    weight: Tensor, hessian: Tensor, spec: GridSpec, steps: int = 20, smallest: float = 0.5
) -> Grid:
    """As `searched_grid`, with the error of each group's own partial output: d H_gg d^T, H = X^T X [K, K].

    This is AWQ's clipping (Lin et al. 2023, section 3.2), with the sum over tokens folded into the Gram
    matrix and the range aligned to the asymmetric grid instead of clipped at +-max.
    """
    group = spec.scheme.group
    count = weight.shape[1] // group
    blocks = hessian.reshape(count, group, count, group).diagonal(dim1=0, dim2=2)  # [g, g, G]
    blocks = blocks.permute(2, 0, 1).contiguous()  # [G, g, g]

    def error(delta: Tensor) -> Tensor:  # [n, G, group] -> [n, G]
        return (torch.bmm(delta.transpose(0, 1), blocks).transpose(0, 1) * delta).sum(-1)

    return _search(weight, error, spec, steps, smallest)


# Elements of a weight searched at a time: what the many passes touch then stays in the cache.
CHUNK = 2**17


def _search(
    weight: Tensor, error: Callable[[Tensor], Tensor], spec: GridSpec, steps: int, smallest: float
) -> Grid:
    """The best range of each group, some rows at a time. `error` is a quadratic form of delta, per group."""
    shrinks = [1 - (1 - smallest) * step / (steps - 1) for step in range(steps)]
    chunks = weight.split(max(1, CHUNK // weight.shape[1]))
    parts = spread(lambda rows: _search_rows(rows, error, spec, shrinks), chunks, weight.device)
    return Grid(torch.cat([p.scales for p in parts]), torch.cat([p.zeros for p in parts]), spec)


def _search_rows(
    weight: Tensor, error: Callable[[Tensor], Tensor], spec: GridSpec, shrinks: list[float]
) -> Grid:
    low, high = range_of(weight, spec)
    grouped = _grouped(weight, spec)
    best = range_grid(low, high, spec)
    least = torch.full_like(low, torch.inf)
    for shrink in shrinks:
        grid = range_grid(low * shrink, high * shrink, spec)
        steps = grouped / grid.scales[..., None]
        floor, ceiling = -grid.zeros[..., None], spec.top - grid.zeros[..., None]
        # In units of the scale: a quadratic error gets it back squared, for one pass less.
        # Two passes: clamp with tensor bounds is several times slower than minimum and maximum.
        delta = torch.minimum(steps.round().maximum(floor), ceiling).sub_(steps)
        loss = error(delta).mul_(grid.scales.square())  # [n, G]
        better = loss < least
        least = torch.where(better, loss, least)
        scales = torch.where(better, grid.scales, best.scales)
        best = Grid(scales, torch.where(better, grid.zeros, best.zeros), spec)
    return best
