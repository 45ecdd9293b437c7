"""Mixed precision: sensitivities against the KL they stand for, the allocation against every other choice."""

import itertools
import json

import pytest
import torch
from tiny_models import make_model

from turbomill.calib_data import load_windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store.convert import convert_checkpoint
from turbomill.errors import UsageError
from turbomill.quant import QuantOptions, quantize
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


def options_of(text_file, **changes):
    fields = {"group": 32, "calib_dataset": str(text_file), "calib_samples": 8, "calib_seqlen": 64}
    return QuantOptions(**{**fields, **changes})


def test_a_budget_is_kept_in_the_checkpoint_and_spent_where_it_counts(tmp_path, text_file):
    path = make_model(tmp_path / "m", torch.float16)
    quantize(path, tmp_path / "mixed", "auto", options_of(text_file, budget=5.5))
    checkpoint = open_checkpoint(tmp_path / "mixed")
    bits, weights, schemes = 0.0, 0, set()
    for prefix in checkpoint.arch.linear_prefixes(checkpoint.config):
        linear = checkpoint.linear(prefix)
        assert isinstance(linear, QuantLinear)
        n = linear.codes.numel()
        # As stored: codes, fp16 scales, and a zero of the codes' width for each group.
        bits += n * linear.scheme.bits + linear.scales.numel() * (16 + linear.scheme.bits)
        weights += n
        schemes.add(linear.scheme.bits)
    assert 5.2 < bits / weights <= 5.5 and schemes == {4, 8}
    made = json.loads((tmp_path / "mixed" / "turbomill.json").read_text())
    assert made["allocation"]["bits_per_weight"] == pytest.approx(bits / weights, abs=1e-3)
    quantize(path, tmp_path / "plain", "auto", options_of(text_file))
    ids = torch.randint(0, 256, (4, 64))
    with torch.no_grad():
        full, mixed, plain = (
            load_dense_model(open_checkpoint(p))(ids).logits.log_softmax(-1)
            for p in (path, tmp_path / "mixed", tmp_path / "plain")
        )
    kl_mixed, kl_plain = ((full.exp() * (full - other)).sum(-1).mean() for other in (mixed, plain))
    assert kl_mixed < 0.7 * kl_plain
    store = convert_checkpoint(tmp_path / "mixed", tmp_path / "store")
    assert store.path.is_dir()


def test_fused_linears_share_a_scheme(tmp_path, text_file):
    quantize(make_model(tmp_path / "m"), tmp_path / "out", "gptq", options_of(text_file, budget=5.0))
    checkpoint = open_checkpoint(tmp_path / "out")
    for index in range(2):
        prefix = checkpoint.arch.layer(index)
        for fusion in checkpoint.arch.fusions:
            assert len({checkpoint.linear(prefix + name).scheme for name in fusion.parts}) == 1


def test_correcting_for_drift_lowers_the_kl(tmp_path, text_file):
    path = make_model(tmp_path / "m", torch.float16, num_hidden_layers=4)
    ids = load_windows(str(text_file), open_checkpoint(path).tokenizer(), 8, 64).ids
    logits = []
    for name, correct in (("with", True), ("without", False)):
        quantize(path, tmp_path / name, "gptq", options_of(text_file, bits=3, correct=correct))
        logits.append(tmp_path / name)
    with torch.no_grad():
        full, with_it, without = (
            load_dense_model(open_checkpoint(p))(ids).logits.log_softmax(-1) for p in (path, *logits)
        )
    better, worse = ((full.exp() * (full - other)).sum(-1).mean() for other in (with_it, without))
    assert better < 0.9 * worse
