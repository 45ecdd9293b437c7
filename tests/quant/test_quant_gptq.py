"""GPTQ against optimal brain quantization written out with the whole inverse Hessian."""

import pytest
import torch

from turbomill.convert.linear import QuantScheme
from turbomill.quant.gptq import inverse_factor, round_columns
from turbomill.quant.grid import GridSpec, minmax_grid, searched_grid
from turbomill.quant.loss import output_loss


def spec_of(bits=4, group=32, symmetric=False, min_zero=0):
    return GridSpec(QuantScheme(bits, group, symmetric), torch.float16, min_zero)


def problem(n, k, seed=0, tokens=None):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator, dtype=torch.float64)
    mix = (
        torch.randn(k, k, generator=generator, dtype=torch.float64) * torch.rand(k, generator=generator) ** 2
    )
    x = torch.randn(tokens or 4 * k, k, generator=generator, dtype=torch.float64) @ mix
    return weight, x.T @ x


def obq(weight, hessian, grid, damping):
    """Each column in order: round it, spread its error over the others, eliminate it from the inverse."""
    k = weight.shape[1]
    inverse = torch.linalg.inv(
        hessian + torch.eye(k, dtype=torch.float64) * damping * hessian.diagonal().mean()
    )
    rest, codes, left = weight.clone(), torch.zeros_like(weight), list(range(k))
    group = grid.spec.scheme.group
    for j in sorted(range(k), key=lambda c: -float(hessian[c, c])):
        scale, zero = grid.scales[:, j // group].double(), grid.zeros[:, j // group].double()
        codes[:, j] = (torch.round(rest[:, j] / scale) + zero).clamp(0, grid.spec.top)
        error = (rest[:, j] - (codes[:, j] - zero) * scale) / inverse[j, j]
        rest = rest - torch.outer(error, inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        left.remove(j)
    return codes


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), [(8, 64, 32), (5, 160, 32), (16, 256, 64), (3, 384, 128)])
def test_codes_equal_obq(n, k, group, symmetric):
    weight, hessian = problem(n, k)
    grid = searched_grid(weight.float(), hessian.diagonal().float(), spec_of(4, group, symmetric))
    ours = round_columns(weight, hessian, grid, 0.01)
    assert torch.equal(ours.codes, obq(weight, hessian, grid, 0.01))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_error_is_lower_than_rounding(bits):
    weight, hessian = problem(32, 128)
    weight, hessian = weight.float(), hessian.float()
    spec = spec_of(bits, 64)
    ours = round_columns(weight, hessian, searched_grid(weight, hessian.diagonal(), spec))
    assert ours.codes.min() >= 0 and ours.codes.max() <= spec.top
    nearest = minmax_grid(weight, spec).round(weight)
    assert output_loss(weight, ours.weight(), hessian) < 0.8 * output_loss(weight, nearest, hessian)


def test_fewer_tokens_than_channels():
    weight, hessian = problem(8, 128, tokens=5)
    spec = spec_of(4, 64)
    weight, hessian = weight.float(), hessian.float()
    ours = round_columns(weight, hessian, searched_grid(weight, hessian.diagonal(), spec))
    nearest = minmax_grid(weight.float(), spec).round(weight.float())
    assert output_loss(weight.float(), ours.weight(), hessian.float()) < output_loss(
        weight.float(), nearest, hessian.float()
    )


def test_silent_inputs_are_rounded_to_nearest():
    weight, _ = problem(8, 64)
    weight = weight.float()
    grid = minmax_grid(weight, spec_of(4, 32))
    ours = round_columns(weight, torch.zeros(64, 64), grid)
    assert torch.equal(ours.codes, grid.codes(weight))


def test_factor_is_the_cholesky_of_the_inverse():
    _, hessian = problem(1, 48)
    upper = inverse_factor(hessian, 0.01)
    damped = hessian + torch.eye(48, dtype=torch.float64) * 0.01 * hessian.diagonal().mean()
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(damped))
    assert torch.equal(upper, upper.triu())
