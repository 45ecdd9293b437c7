"""Grids against their definition, group by group, and the groups that break naive ones."""

import pytest
import torch

from turbomill.convert.linear import QuantScheme
from turbomill.quant.grid import GridSpec, Quantized, clipped_grid, minmax_grid, range_grid, searched_grid

DTYPES = [torch.float16, torch.bfloat16]


def spec_of(bits=4, group=32, symmetric=False, dtype=torch.float16, min_zero=0):
    return GridSpec(QuantScheme(bits, group, symmetric), dtype, min_zero)


def weight_of(n=6, k=96, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_minmax_is_rtn_by_the_book(bits, symmetric, dtype):
    weight, top = weight_of(), 2**bits - 1
    spec = spec_of(bits, 32, symmetric, dtype)
    linear = Quantized(minmax_grid(weight, spec).codes(weight), minmax_grid(weight, spec)).linear(None)
    linear.validate("w")
    assert linear.scales.dtype == dtype
    for n in range(weight.shape[0]):
        for g in range(3):
            w = weight[n, g * 32 : g * 32 + 32]
            if symmetric:
                scale = (2 * w.abs().max() / top).to(dtype).float()
                zero = 2 ** (bits - 1)
            else:
                low, high = min(float(w.min()), 0.0), max(float(w.max()), 0.0)
                scale = torch.tensor((high - low) / top).to(dtype).float()
                zero = int(torch.tensor(-low / float(scale)).round().clamp(0, top))
            codes = (torch.round(w / scale) + zero).clamp(0, top)
            assert float(linear.scales[g, n]) == float(scale)
            assert int(linear.zeros[g, n]) == zero
            assert torch.equal(linear.codes[g * 32 : g * 32 + 32, n].float(), codes)


def test_what_the_checkpoint_decodes_to_is_what_was_meant():
    weight = weight_of()
    grid = minmax_grid(weight, spec_of())
    quantized = Quantized(grid.codes(weight), grid)
    assert torch.equal(quantized.linear(None).dequantize(), quantized.weight())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("make", [minmax_grid, lambda w, s: searched_grid(w, torch.ones(w.shape[1]), s)])
def test_zero_tiny_and_onesided_groups(make, symmetric):
    weight = torch.zeros(5, 32)
    weight[1] = 1e-9  # far below fp16's smallest scale
    weight[2] = torch.linspace(0.5, 1.0, 32)  # no negative weight: the zero would be 0
    weight[3] = torch.linspace(-1.0, -0.5, 32)
    weight[4, 0] = 2.0**-24
    for min_zero in (0, 1):
        grid = make(weight, spec_of(symmetric=symmetric, min_zero=min_zero))
        decoded = grid.round(weight)
        assert bool(torch.isfinite(decoded).all()) and bool((grid.scales > 0).all())
        assert torch.equal(decoded[0], torch.zeros(32))
        assert float((decoded[1] - weight[1]).abs().max()) <= 1e-9
        step = grid.scales.max()
        assert float((decoded[2:4] - weight[2:4]).abs().max()) <= 1.01 * float(step)
        if min_zero:
            assert float(grid.zeros.min()) >= 1  # what GPTQ v1 can say without wrapping


def test_searched_range_is_the_best_of_its_steps():
    weight, importance = weight_of(4, 64), torch.rand(64) ** 4 + 1e-3
    spec = spec_of(3, 32)
    ours = searched_grid(weight, importance, spec, steps=20, smallest=0.5)
    for n in range(4):
        for g in range(2):
            w, h = weight[n, g * 32 : g * 32 + 32][None], importance[g * 32 : g * 32 + 32]
            errors = []
            for step in range(20):
                shrink = 1 - 0.5 * step / 19
                grid = range_grid(
                    w.min().clamp(max=0).reshape(1, 1) * shrink, w.max().reshape(1, 1) * shrink, spec
                )
                errors.append(float(((grid.round(w) - w) ** 2 * h).sum()))
            part = ours.round(weight)[n, g * 32 : g * 32 + 32]
            assert float(((part - w[0]) ** 2 * h).sum()) == pytest.approx(min(errors), rel=1e-4)


def test_clip_minimises_each_groups_partial_output():
    weight, x = weight_of(4, 64), torch.randn(50, 64) * torch.rand(64) * 3
    spec = spec_of(3, 32)
    ours, plain = clipped_grid(weight, x.T @ x, spec), minmax_grid(weight, spec)
    gained = False
    for g in range(2):
        part = slice(g * 32, g * 32 + 32)
        for n in range(4):
            target = x[:, part] @ weight[n, part]
            mine = float((x[:, part] @ ours.round(weight)[n, part] - target).square().sum())
            least = min(
                float((x[:, part] @ candidate - target).square().sum())
                for candidate in _clips(weight[n, part], spec)
            )
            assert mine == pytest.approx(least, rel=1e-3)
            gained |= mine < float((x[:, part] @ plain.round(weight)[n, part] - target).square().sum())
    assert gained


def _clips(w, spec):
    for step in range(20):
        shrink = 1 - 0.5 * step / 19
        low, high = w.min().clamp(max=0).reshape(1, 1), w.max().clamp(min=0).reshape(1, 1)
        yield range_grid(low * shrink, high * shrink, spec).round(w[None])[0]
