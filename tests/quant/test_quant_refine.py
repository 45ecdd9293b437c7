"""Corrections and refinements of a rounding, against dense least squares and brute force."""

import itertools

import pytest
import torch

from turbomill.convert.linear import QuantScheme
from turbomill.quant.correct import corrected
from turbomill.quant.gptq import round_columns
from turbomill.quant.grid import GridSpec, Quantized, searched_grid
from turbomill.quant.inputs import InputStats
from turbomill.quant.refine import descend, refine, refit_scales


def problem(n=24, k=96, group=32, bits=4, symmetric=False):
    torch.manual_seed(0)
    x = torch.randn(400, k) @ (torch.randn(k, k) / k**0.5 + torch.eye(k)) * torch.rand(k).add(0.1)
    weight = torch.randn(n, k)
    hessian = x.T @ x
    spec = GridSpec(QuantScheme(bits, group, symmetric), torch.float16, min_zero=1)
    grid = searched_grid(weight, hessian.diagonal(), spec)
    return weight, hessian, Quantized(grid.codes(weight), grid)


def row_loss(weight, hessian, codes, grid):
    delta = weight - grid.decode(codes)
    return ((delta @ hessian) * delta).sum(-1)


def test_the_correction_solves_the_least_squares_problem():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 16), torch.randn(5, 16)
    drifted = x + 0.3 * torch.randn(300, 16)
    stats = InputStats(16)
    for a, b in zip(drifted.split(100), x.split(100), strict=True):
        stats.add(a, b)
    ours = corrected(weight, stats, 0.05)
    # Rows sqrt(damping) * I pull towards W: ordinary least squares of [drifted; pull] on [x W; pull W].
    pull = torch.eye(16) * (0.05 * (drifted.T @ drifted).diagonal().mean()).sqrt()
    targets = torch.cat([x @ weight.T, pull @ weight.T]).double()
    expected = torch.linalg.lstsq(torch.cat([drifted, pull]).double(), targets).solution.T.float()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    before, after = ((drifted @ w.T - x @ weight.T).square().sum() for w in (weight, ours))
    assert after < 0.9 * before


def test_without_drift_or_inputs_nothing_is_corrected():
    weight, stats = torch.randn(4, 8), InputStats(8)
    assert corrected(weight, stats, 0.1) is weight  # no reference
    stats.add(torch.zeros(3, 8), torch.zeros(3, 8))
    assert corrected(weight, stats, 0.1) is weight  # inputs all zero
    x, stats = torch.randn(20, 8), InputStats(8)
    stats.add(x, x)
    torch.testing.assert_close(corrected(weight, stats, 0.1), weight)


@pytest.mark.parametrize("symmetric", [False, True])
def test_refitted_scales_are_the_least_squares_ones(symmetric):
    weight, hessian, start = problem(symmetric=symmetric)
    grid = refit_scales(weight, hessian, start.codes, start.grid)
    root = torch.linalg.cholesky(hessian.double())  # |W - Q|_H = |root^T (w - q)|
    for row in range(weight.shape[0]):
        columns = []
        for g in range(3):
            basis = torch.zeros(96, dtype=torch.float64)
            part = slice(g * 32, g * 32 + 32)
            basis[part] = start.codes[row, part] - start.grid.zeros[row, g]
            columns.append(root.T @ basis)
        wanted = root.T @ weight[row].double()
        expected = torch.linalg.lstsq(torch.stack(columns, 1), wanted[:, None]).solution[:, 0].float()
        torch.testing.assert_close(grid.scales[row], expected, rtol=2e-3, atol=1e-4)
    assert torch.equal(grid.scales, grid.scales.half().float())  # as they will be stored
    assert (
        row_loss(weight, hessian, start.codes, grid) <= row_loss(weight, hessian, start.codes, start.grid)
    ).all()


def test_a_silent_group_keeps_its_scale():
    weight, hessian, start = problem()
    codes = start.codes.clone()
    codes[:, 32:64] = start.grid.zeros[:, 1:2]  # the whole group stands for 0
    grid = refit_scales(weight, hessian, codes, start.grid)
    assert torch.equal(grid.scales[:, 1], start.grid.scales[:, 1])
    assert torch.isfinite(grid.scales).all()


def test_descent_leaves_no_single_code_to_improve():
    weight, hessian, start = problem(n=6)
    codes = start.codes
    for _ in range(40):
        after = descend(weight, hessian, codes, start.grid)
        if torch.equal(after, codes):
            break
        assert (
            row_loss(weight, hessian, after, start.grid)
            <= row_loss(weight, hessian, codes, start.grid) + 1e-4
        ).all()
        codes = after
    least = row_loss(weight, hessian, codes, start.grid)
    for column, change in itertools.product(range(0, 96, 5), (-1, 1)):
        other = codes.clone()
        other[:, column] = (other[:, column] + change).clamp(0, 15)
        assert (row_loss(weight, hessian, other, start.grid) >= least * (1 - 1e-5)).all()
    assert ((codes >= 0) & (codes <= 15) & (codes == codes.round())).all()


def test_refining_gptq_lowers_its_loss_and_keeps_the_order_of_rows():
    weight, hessian, start = problem(n=1100)  # more than one piece of rows
    solved = round_columns(weight, hessian, start.grid)
    refined = refine(weight, hessian, solved, 2, 0.0)
    before = row_loss(weight, hessian, solved.codes, solved.grid)
    after = row_loss(weight, hessian, refined.codes, refined.grid)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.95 * before.sum()
    assert torch.equal(refined.grid.zeros, solved.grid.zeros)
