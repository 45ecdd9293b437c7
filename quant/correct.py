"""Correcting a linear for the drift of its inputs: the layers before it are quantized, its target is not.

The weight that gives, on the inputs x of the quantized model, what W gives on the full-precision model's x',
in the least-squares sense. GPTAQ (Li et al., arXiv 2504.02692) and Qronos (Zhang et al., arXiv 2505.11695)
fold this into the rounding loop; done before the loop, it serves any way of rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbomill.quant.inputs import InputStats


def corrected(weight: Tensor, stats: InputStats, damping: float) -> Tensor:
    """The [N, K] V that minimises |V X - W X'|^2 + damping * mean(diag H) * |V - W|^2, H = X X^T.

    V = W + W (X' - X) X^T (H + damping)^-1. `weight` itself where there is no drift, or no inputs.
    """
    mean = stats.gram.diagonal().mean()
    if stats.drift is None or not mean > 0:
        return weight
    damped = stats.gram.clone()
    damped.diagonal().add_(damping * mean)
    factor, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return weight
    change = torch.cholesky_solve((weight @ stats.drift).T, factor).T  # [N, K]
    return weight + change if bool(torch.isfinite(change).all()) else weight
