"""Tensor parallel slices: views of the store, that together are the model."""

import pytest
import torch
from architectures import CASES

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.padded import PaddedCheckpoint
from turbomill.convert.store import convert_checkpoint, open_store
from turbomill.convert.store.back import StoreCheckpoint
from turbomill.convert.store.layout import unpack_groups, unpack_w4
from turbomill.convert.store.slices import fitting_sizes, part_of, problems, views
from turbomill.convert.store.verify import check_tensors_against
from turbomill.errors import UsageError

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": True,
    "mlp_bias": True,
}


def weight_of(parts, name, k, n, group):
    """fp32 [N, K] of a rank's views of a linear, each of which is a whole matrix of its own."""
    if f"{name}.weight" in parts:
        return torch.cat([view.float() for view in parts[f"{name}.weight"]])
    found = []
    every = zip(*(parts[f"{name}.{kind}"] for kind in ("qweight", "scales", "zeros")), strict=True)
    for codes, scales, zeros in every:
        rows = codes.shape[0] * 64
        grid = torch.arange(k) // group
        s, z = (unpack_groups(value, group, k, rows).float()[grid] for value in (scales, zeros))
        found.append(((unpack_w4(codes, k, rows).float() - z) * s).T)
    return torch.cat(found)


@pytest.mark.parametrize("form", [None, AwqFormat(QuantScheme(4, 32, False))], ids=["dense", "w4"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_together_are_the_model(tiny, quantized, tmp_path, form, tp):
    path = tiny(**SIZES)
    path = quantized(path, form)[0] if form else path
    store = convert_checkpoint(path, tmp_path / "store")
    assert tp in fitting_sizes(store.model, store.tensors.values())
    ranks = [views(store, tp, rank) for rank in range(tp)]
    for parts in ranks:
        for name, found in parts.items():
            base = store.tensor(name)
            assert all(view.dtype == base.dtype for view in found)
            mapped = [
                store.tensor(name).untyped_storage().nbytes() == v.untyped_storage().nbytes() for v in found
            ]
            assert all(mapped), f"{name} was copied"
    for layer in range(2):
        for kind in ("w_qkv", "w_o", "w_gate_up", "w_down"):
            name = f"layers.{layer}.{kind}"
            whole = store.linear(name).dequantize()
            for rank, parts in enumerate(ranks):
                part = part_of(store.model, name, tp, rank)
                rows = torch.cat([torch.arange(r.start, r.stop) for r in part.rows]) if part.rows else ...
                columns = part.columns or range(whole.shape[1])
                expected = whole[rows][:, columns.start : columns.stop]
                group = store.tensors[f"{name}.scales"].group if form else 0
                ours = weight_of(parts, name, len(columns), len(expected), group)
                assert torch.equal(ours, expected), (name, rank)
                bias = torch.cat(parts[f"{name}.bias"]) if parts[f"{name}.bias"] else torch.zeros(0)
                full = store.tensor(f"{name}.bias")
                assert torch.equal(bias, full[rows] if part.rows else full if rank == 0 else full[:0])
    heads = [parts["output.weight"][0] for parts in ranks]
    assert torch.equal(torch.cat(heads), store.tensor("output.weight"))


def test_an_mlp_split_over_ranks_computes_the_same(tiny, tmp_path):
    store = convert_checkpoint(tiny(dtype=torch.float32, **SIZES), tmp_path / "store")
    x = torch.randn(3, 256)
    up, down = (store.linear(f"layers.0.{name}") for name in ("w_gate_up", "w_down"))

    def gated(y):
        gate, linear = y.unflatten(-1, (-1, 2, 8)).unbind(-2)
        return (torch.nn.functional.silu(gate) * linear).flatten(-2)

    whole = gated(x @ up.weight.T + up.bias) @ down.weight.T + down.bias
    total = torch.zeros_like(whole)
    for rank in range(4):
        parts = views(store, 4, rank)
        inner = gated(x @ parts["layers.0.w_gate_up.weight"][0].T + parts["layers.0.w_gate_up.bias"][0])
        total += inner @ parts["layers.0.w_down.weight"][0].T
        total += sum(parts["layers.0.w_down.bias"], torch.zeros(256))
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gemma3", "glm4"])
def test_other_architectures(name, tmp_path):
    CASES[name].make(tmp_path / "model")
    store = convert_checkpoint(tmp_path / "model", tmp_path / "store")
    parts = [views(store, 2, rank) for rank in range(2)]
    for key, info in store.tensors.items():
        linear, _, kind = key.rpartition(".")
        joined = [view for rank in parts for view in rank[key]]
        split = part_of(store.model, linear, 2, 0)
        if kind == "weight" and split.columns is not None:
            assert torch.equal(torch.cat(joined, -1), store.tensor(key)), key
        elif kind == "weight" and split.rows is not None and len(split.rows) == 1:
            assert torch.equal(torch.cat(joined, len(info.logical) - 2), store.tensor(key)), key


def test_what_does_not_split_is_named(tiny, quantized, tmp_path):
    fields = {**SIZES, "intermediate_size": 448, "attention_bias": False, "mlp_bias": False}
    path, _ = quantized(tiny(**fields), AwqFormat(QuantScheme(4, 64, False)))
    store = convert_checkpoint(path, tmp_path / "store")
    assert problems(store.model, store.tensors.values(), 2) == [
        "w_down: 448 columns in blocks of 64 are 7 blocks: they do not split in 2"
    ]
    assert problems(store.model, store.tensors.values(), 8) == ["w_qkv: 4 query heads do not split in 8"]
    with pytest.raises(ValueError, match="tp 2: w_down: 448 columns in blocks of 64 are 7 blocks"):
        views(store, 2, 0)
    path, _ = quantized(tiny("b", **SIZES), GptqFormat(QuantScheme(4, -1, False), 2))
    assert fitting_sizes(*sized(convert_checkpoint(path, tmp_path / "channel"))) == [1]
    assert "1 blocks" in problems(*sized(open_store(tmp_path / "channel")), 2)[0]


def sized(store):
    return store.model, list(store.tensors.values())


def mlp(linears, x):
    """What an MLP of dequantized linears computes, fp32."""
    gate, up, down = (linears[name] for name in ("gate_proj", "up_proj", "down_proj"))
    inner = torch.nn.functional.silu(x @ gate.dequantize().T + gate.bias.float()) * (
        x @ up.dequantize().T + up.bias.float()
    )
    return inner @ down.dequantize().T + down.bias.float()


FORMS = [
    None,
    AwqFormat(QuantScheme(4, 64, False)),
    GptqFormat(QuantScheme(4, 32, True), 1),
    CompressedTensorsFormat(QuantScheme(4, -1, False)),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form and form.scheme))
def test_padding_makes_a_store_split(tiny, quantized, tmp_path, form):
    path = tiny(**{**SIZES, "intermediate_size": 448})
    path = quantized(path, form)[0] if form else path
    source = open_checkpoint(path)
    if form is not None and form.scheme.group < 0:
        with pytest.raises(UsageError, match=r"--pad-tp 2: w_o: 256 columns .* tp that work: 1"):
            convert_checkpoint(path, tmp_path / "store", pad_tp=2)
        return
    plain = convert_checkpoint(path, tmp_path / "plain")
    store = convert_checkpoint(path, tmp_path / "store", pad_tp=4)
    inner = store.model["intermediate_size"]
    assert 4 in fitting_sizes(*sized(store)) and (4 in fitting_sizes(*sized(plain))) == (form is None)
    assert inner == (512 if form else 448)  # rows and columns of a dense model split as they are
    assert check_tensors_against(store, source).ok
    back = StoreCheckpoint(store)
    x = torch.randn(5, 256)
    for layer in range(2):
        ours, theirs = (
            {
                name: model.linear(f"model.layers.{layer}.mlp.{name}")
                for name in ("gate_proj", "up_proj", "down_proj")
            }
            for model in (back, source)
        )
        assert ours["up_proj"].shape == (256, inner) and theirs["up_proj"].shape[1] == 448
        torch.testing.assert_close(mlp(ours, x), mlp(theirs, x), rtol=1e-5, atol=1e-5)
    assert store.manifest["source"].get("padded") == ({"intermediate_size": inner} if form else None)


def test_heads_that_do_not_split_are_no_matter_of_padding(tiny, tmp_path):
    path = tiny(num_attention_heads=6, num_key_value_heads=3, hidden_size=192)
    with pytest.raises(UsageError, match="--pad-tp 2: w_qkv: 3 KV heads do not split in 2"):
        convert_checkpoint(path, tmp_path / "store", pad_tp=2)


def test_a_merged_gate_and_up_is_padded_half_by_half(tmp_path, quantized):
    CASES["phi3"].make(tmp_path / "model", torch.float16, intermediate_size=96)
    path, linears = quantized(tmp_path / "model", AwqFormat(QuantScheme(4, 32, False)))
    padded = PaddedCheckpoint(open_checkpoint(path), {"intermediate_size": 128})
    for prefix, linear in linears.items():
        ours, theirs = padded.linear(prefix).dequantize(), linear.dequantize()
        if prefix.endswith("gate_up_proj"):
            zeros = torch.zeros(32, ours.shape[1])
            theirs = torch.cat([theirs[:96], zeros, theirs[96:], zeros])
        elif prefix.endswith("down_proj"):
            theirs = torch.nn.functional.pad(theirs, (0, 32))
        assert torch.equal(ours, theirs), prefix
