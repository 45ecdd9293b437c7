"""AWQ: the Gram-matrix objective is the output error, the search takes the best, folding changes nothing."""

import pytest
import torch

from turbomill.convert.linear import QuantScheme
from turbomill.quant.awq import candidate, relative_magnitude, scaled_loss, search_scale
from turbomill.quant.grid import GridSpec, Quantized, minmax_grid
from turbomill.quant.inputs import InputStats
from turbomill.quant.smooth import fold_into_linear, fold_into_norm, shared_channels

SPEC = GridSpec(QuantScheme(4, 32, False), torch.float16)


def inputs(tokens=80, k=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=generator) * torch.exp(2 * torch.randn(k, generator=generator))
    stats = InputStats(k)
    for batch in x.split(30):
        stats.add(batch[None])
    return x, stats, torch.randn(48, k, generator=generator)


def test_statistics_are_sums_over_tokens():
    x, stats, _ = inputs()
    assert stats.tokens == 80
    torch.testing.assert_close(stats.gram, x.T @ x, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(stats.absmean, x.abs().mean(0))


def grid(weight, absmean, spec):
    """The first pass of the search: no scaling, then both families in tenths."""
    w = relative_magnitude(weight, spec)
    scales = [candidate(absmean, w, step / 10, family) for step in range(11) for family in (False, True)]
    return [torch.ones_like(absmean), *scales]


def test_objective_is_the_output_error():
    x, stats, weight = inputs()
    for scale in grid(weight, stats.absmean, SPEC):
        rounded = minmax_grid(weight * scale, SPEC).round(weight * scale)
        direct = float((x @ weight.T - (x / scale) @ rounded.T).square().sum())
        assert scaled_loss(weight, scale, stats.gram, SPEC) == pytest.approx(direct, rel=2e-3)


def test_search_takes_the_best_candidate_and_beats_no_scaling():
    _, stats, weight = inputs()
    share = torch.arange(64)
    best = search_scale(weight, stats, SPEC, share)
    losses = [scaled_loss(weight, s, stats.gram, SPEC) for s in grid(weight, stats.absmean, SPEC)]
    found = scaled_loss(weight, best, stats.gram, SPEC)
    assert found <= min(losses)
    assert found < 0.8 * losses[0]  # candidate 0 is "no scaling"
    fixed = search_scale(weight, stats, SPEC, share, search=False)
    assert found <= scaled_loss(weight, fixed, stats.gram, SPEC)


def test_no_scaling_is_kept_when_nothing_beats_it():
    weight = torch.ones(8, 64)  # rounds exactly as it is
    _, stats, _ = inputs()
    assert torch.equal(search_scale(weight, stats, SPEC, torch.arange(64)), torch.ones(64))


def test_query_heads_of_one_kv_head_share_their_scale():
    share = shared_channels(inputs=6 * 4, outputs=2 * 4, head_dim=4)
    # Query heads 0, 1, 2 read KV head 0 and heads 3, 4, 5 read KV head 1, channel by channel.
    assert share.tolist() == [0, 1, 2, 3] * 3 + [4, 5, 6, 7] * 3
    assert torch.equal(shared_channels(8, 8, 4), torch.arange(8))
    stats = InputStats(24)
    stats.add(torch.randn(50, 24) * torch.arange(1, 25))
    spec = GridSpec(QuantScheme(4, 8, False), torch.float16)
    assert search_scale(torch.randn(16, 24), stats, spec, share).shape == (8,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_folding_into_a_norm_is_exact_after_rounding(dtype):
    norm = torch.randn(64).to(dtype).float()
    norm[3], norm[4] = 0.0, -norm[4].abs()
    scale = torch.rand(64) * 3 + 0.1
    scale[5] = 1e-9  # would leave fp16's range
    divided, applied = fold_into_norm(norm, scale, dtype)
    assert torch.equal(divided.to(dtype).float(), divided)
    torch.testing.assert_close(divided * applied, norm, rtol=1e-6, atol=0)
    assert bool((applied > 0).all()) and applied[3] == 1
    if dtype == torch.float16:
        assert applied[5] == 1
    torch.testing.assert_close(applied[6:], scale[6:], rtol=1e-2, atol=0)


def test_folding_into_a_quantized_linear_changes_no_code():
    weight, bias, scale = torch.randn(16, 64), torch.randn(16), torch.rand(16) + 0.5
    grid = minmax_grid(weight, SPEC)
    before = Quantized(grid.codes(weight), grid)
    after, folded_bias = fold_into_linear(before, bias, scale)
    assert torch.equal(after.codes, before.codes)
    torch.testing.assert_close(after.weight() * scale[:, None], before.weight(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(folded_bias * scale, bias)
    with pytest.raises(OverflowError):
        fold_into_linear(before, None, torch.full((16,), 1e-9))
