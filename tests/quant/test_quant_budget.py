"""Mixed precision: sensitivities against the KL they stand for, the allocation against every other choice."""

import itertools

import pytest
import torch
from tiny_models import make_model

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.errors import UsageError
from turbomill.quant.budget import Unit, allocate, candidates
from turbomill.quant.decoder import StreamedDecoder
from turbomill.quant.grid import GridSpec, searched_grid
from turbomill.quant.sensitivity import sensitivities

SCHEMES = [QuantScheme(3, 32, False), QuantScheme(4, 32, False), QuantScheme(8, 32, False)]


def test_a_sensitivity_predicts_the_kl_of_rounding_that_stage_alone(tmp_path):
    torch.manual_seed(0)
    checkpoint = open_checkpoint(make_model(tmp_path / "m", torch.float32))
    arch = checkpoint.arch
    decoder = StreamedDecoder(checkpoint)
    units = [fusion.parts for fusion in arch.fusions]
    ids = torch.randint(0, 256, (128, 24))

    def spec_of(scheme):
        return GridSpec(scheme, torch.float16)

    found = sensitivities(decoder, ids.split(32), lambda _index: units, SCHEMES, spec_of)
    assert len(found) == 2 and all(len(layer) == len(units) for layer in found)
    model = load_dense_model(checkpoint)
    with torch.no_grad():
        wanted = model(ids).logits.log_softmax(-1)
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _m, args, name=name: seen.__setitem__(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    for (index, at), scheme in itertools.product([(0, 0), (0, 2), (1, 1), (1, 3)], SCHEMES[2:]):
        kept = {}
        for name in units[at]:
            module = model.get_submodule(f"model.layers.{index}.{name}")
            kept[name] = module.weight.data.clone()
            importance = seen[f"model.layers.{index}.{name}"].reshape(-1, module.in_features).square().sum(0)
            module.weight.data = searched_grid(module.weight.data, importance, spec_of(scheme)).round(
                module.weight.data
            )
        with torch.no_grad():
            given = model(ids).logits.log_softmax(-1)
        kl = float((wanted.exp() * (wanted - given)).sum(-1).mean())
        assert found[index][at][scheme] == pytest.approx(kl, rel=0.4), (index, at, scheme)
        for name, weight in kept.items():
            model.get_submodule(f"model.layers.{index}.{name}").weight.data = weight


def units(seed: int) -> list[Unit]:
    torch.manual_seed(seed)
    return [
        Unit(
            f"u{i}",
            int(torch.randint(1, 5, (1,))) * 1000,
            {s: float(torch.rand(()) * 4.0**-s.bits) for s in SCHEMES},
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_allocation_is_within_one_upgrade_of_the_best_of_all(seed):
    given = units(seed)
    weights = sum(u.weights for u in given)
    for budget in (4.0, 4.8, 6.0, 9.0):
        chosen = allocate(given, budget)
        spent = sum(u.bits(chosen[u.name]) for u in given)
        assert spent <= budget * weights
        loss = sum(u.losses[chosen[u.name]] for u in given)
        fitting = (
            sum(u.losses[s] for u, s in zip(given, choice, strict=True))
            for choice in itertools.product(SCHEMES, repeat=len(given))
            if sum(u.bits(s) for u, s in zip(given, choice, strict=True)) <= budget * weights
        )
        best = min(fitting)
        step = max(max(u.losses.values()) - min(u.losses.values()) for u in given)
        assert best <= loss + 1e-12 and loss <= best + step
    assert set(allocate(given, 100).values()) <= {min(SCHEMES, key=u.losses.get) for u in given}  # type: ignore[arg-type]


def test_more_budget_never_costs_quality():
    given = units(7)
    losses = [
        sum(u.losses[scheme] for u, scheme in zip(given, allocate(given, b).values(), strict=True))
        for b in (3.7, 4.0, 4.5, 5.0, 6.0, 8.0, 9.0)
    ]
    assert losses == sorted(losses, reverse=True)


def test_candidates_divide_every_linear_and_fit_the_budget():
    base = QuantScheme(4, 64, False)
    assert [str(s) for s in candidates(base, [576, 1536], 4.4)] == [
        "w4g64asym",
        "w4g32asym",
        "w8g64asym",
        "w8g32asym",
    ]
    assert candidates(base, [4096], 4.2)[0] == QuantScheme(4, 128, False)
    assert candidates(base, [576], 4.0)[0] == QuantScheme(3, 64, False)  # 3 bits only where 4 do not fit
    with pytest.raises(UsageError, match=r"--budget 2\.5: below the smallest"):
        candidates(base, [576], 2.5)
    with pytest.raises(UsageError, match="no group"):
        candidates(base, [100], 4.5)
