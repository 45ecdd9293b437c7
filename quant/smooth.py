"""Moving a scale s from a linear's inputs into what produces them: y = W x = (W s)(x / s).

In full precision nothing changes; on a quantization grid the channels with a large s become more precise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbomill.quant.grid import Grid, Quantized


def fold_into_norm(
    norm: Tensor, scale: Tensor, dtype: torch.dtype, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Divide a norm's weight [H] by `scale` [H]; returns the new weight and the scale that was really
    applied. The norm multiplies by `norm + offset`.

    The new weight is rounded to `dtype`, as it will be stored, and the applied scale is the exact quotient:
    rounding the norm costs no accuracy because the linear absorbs it. A channel that would leave the dtype's
    range keeps 1.
    """
    divided = ((norm + offset) / scale - offset).to(dtype).float()
    applied = (norm + offset) / (divided + offset)
    usable = torch.isfinite(divided) & torch.isfinite(applied) & (applied > 0)
    return torch.where(usable, divided, norm), torch.where(usable, applied, 1.0)


def fold_into_linear(
    quantized: Quantized, bias: Tensor | None, scale: Tensor
) -> tuple[Quantized, Tensor | None]:
    """Divide the outputs [N] of an already quantized linear by `scale` [N]: only its grid's scales change, no
    code.

    Raises OverflowError when a scale would leave the 16-bit range.
    """
    grid = quantized.grid
    scales = (grid.scales / scale[:, None]).to(grid.spec.dtype).float()  # [N, G]
    if not bool(torch.isfinite(scales).all()) or bool((scales == 0).any()):
        raise OverflowError("a folded scale leaves the 16-bit range")
    folded = Quantized(quantized.codes, Grid(scales, grid.zeros, grid.spec))
    return folded, None if bias is None else bias / scale


def shared_channels(inputs: int, outputs: int, head_dim: int) -> Tensor:
    """Which output of the previous linear feeds each input: int64 [inputs].

    One to one where the sizes agree; under grouped-query attention v's [Nkv * D] feed o's [Nq * D] head by
    head.
    """
    index = torch.arange(inputs)
    if inputs == outputs:
        return index
    repeat = inputs // outputs
    return index // head_dim // repeat * head_dim + index % head_dim
