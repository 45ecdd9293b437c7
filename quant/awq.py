"""AWQ (Lin et al., arXiv 2306.00978): scale salient input channels up before rounding, then clip the ranges.

Both searches run on the Gram matrix H = X^T X: the output error of a candidate is tr((W - W') H (W - W')^T),
exactly the sum over the calibration tokens, at the cost of one small product instead of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turbomill.quant.grid import Grid, GridSpec, clipped_grid, minmax_grid
from turbomill.quant.inputs import InputStats
from turbomill.quant.loss import output_loss

RATIOS = 20
FIXED_RATIO = 0.5  # without the search
SMALLEST = 1e-4  # below this a channel is silent, and its scale would only amplify noise


def search_scale(
    weight: Tensor, stats: InputStats, spec: GridSpec, share: Tensor, search: bool = True
) -> Tensor:
    """The scale s [C] of the previous op's channels with the least output error of round(W * s) / s; ones
    compete.

    `weight` [N, K] stacks all linears that read these inputs. `share` int64 [K] says which of the previous
    op's C output channels each input is (several inputs share one where a KV head feeds several query heads).
    """
    best, least = None, float("inf")
    for scale in candidates(weight, stats.absmean, spec, share, search):
        loss = scaled_loss(weight, scale[share], stats.gram, spec)
        if loss < least:
            best, least = scale, loss
    if best is None:  # every candidate overflowed: leave the weight alone
        return torch.ones(int(share.max()) + 1)
    return best


def scaled_loss(weight: Tensor, scale: Tensor, gram: Tensor, spec: GridSpec) -> float:
    """The output error of weight [N, K] rounded in coordinates scaled by `scale` [K]."""
    scaled = weight * scale
    return output_loss(weight, minmax_grid(scaled, spec).round(scaled).div_(scale), gram)


def candidates(
    weight: Tensor, absmean: Tensor, spec: GridSpec, share: Tensor, search: bool
) -> Iterator[Tensor]:
    """Scales to try, each [C] with geometric centre 1: none, x^r, and x^r / w^(1 - r).

    x is the channel's mean |input| and w its mean |weight| relative to its group's largest.
    """
    count = int(share.max()) + 1
    x = _pool(absmean, share, count)
    w = _pool(relative_magnitude(weight, spec), share, count)
    yield torch.ones(count)
    ratios = [step / RATIOS for step in range(1, RATIOS + 1)] if search else [FIXED_RATIO]
    for ratio in ratios:
        power = x.clamp(min=SMALLEST).pow(ratio)
        yield _centred(power)
        if ratio < 1:
            yield _centred(power / w.clamp(min=SMALLEST).pow(1 - ratio))


def relative_magnitude(weight: Tensor, spec: GridSpec) -> Tensor:
    """Mean over rows of |w| / the largest |w| of its group, [K]."""
    n, k = weight.shape
    grouped = weight.abs().reshape(n, -1, spec.scheme.group)
    largest = grouped.amax(-1, keepdim=True).clamp(min=1e-12)
    return (grouped / largest).reshape(n, k).mean(0)


def _pool(values: Tensor, share: Tensor, count: int) -> Tensor:
    """Mean of values [K] over the inputs that share a channel: [C]."""
    sums = torch.zeros(count).index_add_(0, share, values)
    return sums / torch.bincount(share, minlength=count).clamp(min=1)


def _centred(scale: Tensor) -> Tensor:
    scale = scale.clamp(min=SMALLEST)
    return scale / (scale.max() * scale.min()).sqrt()


def clip(weight: Tensor, stats: InputStats, scale: Tensor, spec: GridSpec) -> Grid:
    """The grid of weight * scale [N, K] with each group's range clipped where that lowers its output
    error."""
    gram = stats.gram / scale / scale[:, None]
    return clipped_grid(weight * scale, gram, spec)
