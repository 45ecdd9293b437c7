"""GPTQ (Frantar et al., arXiv 2210.17323): round column by column, moving each error onto the columns still
to come."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from turbomill.quant.grid import Grid, Quantized
from turbomill.quant.parallel import row_parts, spread

logger = logging.getLogger("turbomill.quant")

BLOCK = 128  # columns updated at once ("lazy batch updates", section 3.3 of the paper)


def round_columns(weight: Tensor, hessian: Tensor, grid: Grid, damping: float = 0.01) -> Quantized:
    """Codes [N, K] for weight [N, K] that greedily minimise tr((W - Q) H (W - Q)^T), H = X^T X [K, K].

    Grids are fixed beforehand, per group of the original order; columns go in order of falling diag(H). So
    important columns go first and no reader needs g_idx.
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order], damping)  # [K, K], upper
    group = order // grid.spec.scheme.group

    def solve(rows: slice) -> Tensor:
        # Columns become contiguous rows; a part's rows know nothing of the others'.
        rest = weight[rows][:, order].T.contiguous()  # [K, n]
        scales = grid.scales[rows].to(weight.dtype).T[group].contiguous()  # [K, n]
        zeros = grid.zeros[rows].to(weight.dtype).T[group].contiguous()  # [K, n]
        return _solve(rest, scales, zeros, factor, grid.spec.top)

    parts = spread(solve, row_parts(weight.shape[0], weight.device), weight.device)
    restored = torch.empty_like(weight.T)
    restored[order] = torch.cat(parts, dim=1)
    return Quantized(restored.T.contiguous(), grid)


def _solve(rest: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, top: int) -> Tensor:
    """Codes [K, n] of columns `rest` [K, n], which is used up; each column has its scales and zeros."""
    k = rest.shape[0]
    codes = torch.empty_like(rest)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        block, inverse = rest[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        diagonal = inverse.diagonal().tolist()
        for i in range(stop - start):
            at = start + i
            code = torch.div(block[i], scales[at]).round_().add_(zeros[at]).clamp_(0, top)
            error = (block[i] - (code - zeros[at]) * scales[at]).div_(diagonal[i])
            block[i + 1 :].addr_(inverse[i, i + 1 :], error, alpha=-1)
            codes[at], errors[i] = code, error
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor U of the damped inverse, H^-1 = U^T U: row i is what OBQ's loop would use at
    step i.

    Damping is a share of the mean diagonal, raised tenfold while the matrix is not positive definite.
    """
    mean = hessian.diagonal().mean()
    if not mean > 0:  # inputs all zero: any rounding is as good
        return torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device)
    for _ in range(5):
        # Flipped both ways, H = A A^T with A upper: one factorization, and U = A^-1 needs no inverse of H.
        flipped = hessian.flip(0, 1)  # [K, K], like all of these: no more of them at a time than need be
        flipped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(flipped)
        del flipped
        if not failed:
            lower = lower.flip(0, 1)
            eye = torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device)
            upper = torch.linalg.solve_triangular(lower, eye, upper=True)
            del lower, eye
            if bool(upper.sum(dtype=torch.float64).isfinite()):  # which shows any element that is not
                return upper
        logger.debug("GPTQ: damping %g is too little for a %d x %d Hessian", damping, *hessian.shape)
        damping = max(damping * 10, 1e-4)
    return torch.diag(hessian.diagonal().add(mean).rsqrt())
