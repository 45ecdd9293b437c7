"""Improving a rounding that is already good: least-squares scales, and coordinate descent over the codes.

Both lower tr((W - Q) H (W - Q)^T), the error on the calibration inputs, and never raise it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbomill.quant.grid import Grid, Quantized
from turbomill.quant.parallel import row_parts, spread

BLOCK = 128  # columns whose changes are applied together


def refine(weight: Tensor, hessian: Tensor, quantized: Quantized, passes: int, damping: float) -> Quantized:
    """`passes` times: refit the scales of [N, K] codes, then visit every code once."""
    mean = hessian.diagonal().mean()
    if not mean > 0:
        return quantized
    damped = hessian.clone()
    damped.diagonal().add_(damping * mean)

    def improve(rows: slice) -> tuple[Tensor, Tensor]:
        part, grid = weight[rows], quantized.grid
        codes = quantized.codes[rows].float()
        grid = Grid(grid.scales[rows], grid.zeros[rows], grid.spec)
        for _ in range(passes):
            grid = refit_scales(part, damped, codes, grid)
            codes = descend(part, damped, codes, grid)
        return codes, grid.scales

    done = spread(improve, row_parts(weight.shape[0], weight.device), weight.device)
    grid = Grid(torch.cat([scales for _, scales in done]), quantized.grid.zeros, quantized.grid.spec)
    return Quantized(torch.cat([codes for codes, _ in done]), grid)


def refit_scales(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid) -> Grid:
    """The scales [N, G] that err least for given codes [N, K]: one small least-squares problem per row."""
    n, k = weight.shape
    group = grid.spec.scheme.group
    count = k // group
    centred = codes.reshape(n, count, group) - grid.zeros[..., None]  # [N, G, group]
    normal = weight.new_empty(n, count, count)
    for g in range(count):
        seen = centred[:, g] @ hessian[g * group : (g + 1) * group]  # [N, K]
        normal[:, g] = (seen.reshape(n, count, group) * centred).sum(-1)
    delta = weight - grid.decode(codes)
    wanted = ((delta @ hessian).reshape(n, count, group) * centred).sum(-1)  # [N, G]
    # A group whose codes all stand for 0 has no say: its scale stays.
    diagonal = normal.diagonal(dim1=1, dim2=2)
    silent = diagonal <= 0
    ridge = diagonal.mean(-1, keepdim=True) * 1e-6 + silent.float()
    change = torch.linalg.solve(normal + torch.diag_embed(ridge), wanted[..., None])[..., 0]
    found = (grid.scales + change.masked_fill(silent, 0)).to(grid.spec.dtype).float()
    found = torch.where(torch.isfinite(found) & (found > 0), found, grid.scales)
    # What rounding to 16 bits leaves of the gain: the error is quadratic in the change.
    change = found - grid.scales
    gain = (change * (2 * wanted - (normal @ change[..., None])[..., 0])).sum(-1, keepdim=True)
    return Grid(torch.where(gain > 0, found, grid.scales), grid.zeros, grid.spec)


def descend(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid) -> Tensor:
    """Every code [N, K] in turn becomes the best one given all the others (QuantEase, Behdin et al.,
    arXiv 2309.01885)."""
    k, group = weight.shape[1], grid.spec.scheme.group
    codes = codes.T.contiguous()  # [K, N]: columns become contiguous rows
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()  # [G, N]
    delta = (weight - grid.decode(codes.T)).T.contiguous()  # [K, N]
    pull = hessian @ delta  # [K, N]: the gradient by the weight, halved
    diagonal = hessian.diagonal().tolist()
    top = grid.spec.top
    order = hessian.diagonal().argsort(descending=True, stable=True)
    for start in range(0, k, BLOCK):
        columns = order[start : start + BLOCK]
        across = hessian[columns]  # [b, K]
        block = across[:, columns]  # [b, b]
        local = pull[columns]  # [b, N]
        moved = torch.zeros_like(local)
        for i, at in enumerate(columns.tolist()):
            scale, zero = scales[at // group], zeros[at // group]
            wanted = delta[at] + codes[at].sub(zero).mul_(scale)  # the weight itself
            wanted = wanted + (local[i] - diagonal[at] * delta[at]) / diagonal[at]
            code = torch.div(wanted, scale).round_().add_(zero).clamp_(0, top)
            step = (codes[at] - code) * scale  # change of delta
            codes[at] = code
            delta[at] += step
            moved[i] = step
            local.addr_(block[i], step)
        pull.addmm_(across.T, moved)
    return codes.T.contiguous()
