"""AWQ (Lin et al., arXiv 2306.00978): scale salient input channels up before rounding, then clip the ranges.

Both searches run on the Gram matrix H = X^T X: the output error of a candidate is tr((W - W') H (W - W')^T),
exactly the sum over the calibration tokens, at the cost of one small product instead of a forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbomill.quant.grid import GridSpec, minmax_grid
from turbomill.quant.inputs import InputStats
from turbomill.quant.loss import output_loss
from turbomill.quant.parallel import spread

RATIOS = 10  # a first pass in tenths, then half a step around the best: a grid of 20
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
    count = int(share.max()) + 1
    x = _pool(stats.absmean, share, count).clamp(min=SMALLEST)
    w = _pool(relative_magnitude(weight, spec), share, count).clamp(min=SMALLEST)
    ones = torch.ones(count, device=weight.device)
    best, least, where = ones, scaled_loss(weight, ones[share], stats.gram, spec), (0.0, False)

    def consider(ratios: list[float], families: tuple[bool, ...]) -> None:
        nonlocal best, least, where
        # The other family's ratio 1, and no scaling, are there already.
        tried = [(r, by_weight) for r in ratios for by_weight in families if r != (1 if by_weight else 0)]
        scales = [candidate(x, w, ratio, by_weight) for ratio, by_weight in tried]
        losses = spread(
            lambda scale: scaled_loss(weight, scale[share], stats.gram, spec), scales, weight.device
        )
        for at, scale, loss in zip(tried, scales, losses, strict=True):
            if loss < least:  # NaN, where a scale left the 16-bit range, is not
                best, least, where = scale, loss, at

    if not search:
        consider([FIXED_RATIO], (False,))
        return best
    consider([step / RATIOS for step in range(RATIOS + 1)], (False, True))
    ratio, by_weight = where
    consider([r for r in (ratio - 0.5 / RATIOS, ratio + 0.5 / RATIOS) if 0 <= r <= 1], (by_weight,))
    return best


def scaled_loss(weight: Tensor, scale: Tensor, gram: Tensor, spec: GridSpec) -> float:
    """The output error of weight [N, K] rounded in coordinates scaled by `scale` [K]."""
    scaled = weight * scale
    return output_loss(weight, minmax_grid(scaled, spec).round(scaled).div_(scale), gram)


def candidate(x: Tensor, w: Tensor, ratio: float, by_weight: bool) -> Tensor:
    """A scale to try, [C] with geometric centre 1: x^r, or `by_weight` x^r / w^(1 - r).

    x is a channel's mean |input| and w its mean |weight| relative to its group's largest.
    """
    scale = x.pow(ratio) / w.pow(1 - ratio) if by_weight else x.pow(ratio)
    scale = scale.clamp(min=SMALLEST)
    return scale / (scale.max() * scale.min()).sqrt()


def relative_magnitude(weight: Tensor, spec: GridSpec) -> Tensor:
    """Mean over rows of |w| / the largest |w| of its group, [K]."""
    n, k = weight.shape
    grouped = weight.abs().reshape(n, -1, spec.scheme.group)
    largest = grouped.amax(-1, keepdim=True).clamp(min=1e-12)
    return (grouped / largest).reshape(n, k).mean(0)


def _pool(values: Tensor, share: Tensor, count: int) -> Tensor:
    """Mean of values [K] over the inputs that share a channel: [C]."""
    sums = torch.zeros(count, device=values.device).index_add_(0, share, values)
    return sums / torch.bincount(share, minlength=count).clamp(min=1)
