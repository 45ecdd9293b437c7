"""The way back: a store, or a checkpoint, as a checkpoint in any format, without the loss of a bit."""

import json

import pytest
import torch
from architectures import CASES
from safetensors.torch import load_file

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.diff import diff
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.rewrite import rewrite
from turbomill.convert.store import convert_checkpoint
from turbomill.errors import CheckpointError, UsageError

FORMS = {
    "awq": [AwqFormat(QuantScheme(4, 32, False)), AwqFormat(QuantScheme(4, 64, True))],
    "gptq": [GptqFormat(QuantScheme(4, 32, True), 1)],
    "gptq_v2": [
        GptqFormat(QuantScheme(4, 64, False), 2),
        GptqFormat(QuantScheme(4, 128, False), 2),  # 192 rows: stored in groups of 64, which repeat
        GptqFormat(QuantScheme(4, -1, False), 2),
    ],
    "compressed-tensors": [
        CompressedTensorsFormat(QuantScheme(4, 32, True)),
        CompressedTensorsFormat(QuantScheme(4, -1, False)),
    ],
}


def same_tensors(a, b, but=()):
    one, other = (load_file(path / "model.safetensors") for path in (a, b))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype or name in but, name
        assert torch.equal(tensor, other[name]) or name in but, name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_dense_store_of_every_architecture_goes_back(name, dtype, tmp_path):
    CASES[name].make(tmp_path / "model", dtype)
    store = convert_checkpoint(tmp_path / "model", tmp_path / "store")
    back = rewrite(tmp_path / "store", tmp_path / "back", "hf")
    computed = {"lm_head.weight"} if open_checkpoint(back).arch.head_transform else set()
    if store.model["num_layers"] and open_checkpoint(back).arch.norm_offset and dtype == torch.float32:
        # 1 + w was rounded to fp32 when the store was made: what comes back gives those bits again.
        computed |= {key for key in open_checkpoint(back).names() if "norm" in key}
    same_tensors(tmp_path / "model", back, computed)
    assert diff(tmp_path / "store", back).same or "lm_head.weight" in computed
    again = convert_checkpoint(back, tmp_path / "again")
    for key in store.tensors:
        close = key == "output.weight" and computed
        assert torch.equal(store.tensor(key), again.tensor(key)) or close, key


@pytest.mark.parametrize(
    ("target", "form"),
    [(target, form) for target, forms in FORMS.items() for form in forms],
    ids=lambda value: value if isinstance(value, str) else str(value.scheme),
)
def test_a_quantized_store_gives_its_checkpoint_back(tiny, quantized, tmp_path, target, form):
    path, _linears = quantized(tiny(attention_bias=True, dtype=torch.bfloat16), form)
    convert_checkpoint(path, tmp_path / "store")
    back = rewrite(tmp_path / "store", tmp_path / "back", target)
    same_tensors(path, back)
    ours, theirs = (json.loads((where / "config.json").read_text()) for where in (back, path))
    for key in ("group_size", "bits", "quant_method", "sym", "config_groups"):
        assert ours["quantization_config"].get(key) == theirs["quantization_config"].get(key)


@pytest.mark.parametrize("target", ["awq", "gptq_v2", "compressed-tensors"])
def test_from_format_to_format_without_a_store(tiny, quantized, tmp_path, target):
    path, linears = quantized(tiny(), AwqFormat(QuantScheme(4, 32, False)))
    back = open_checkpoint(rewrite(path, tmp_path / "back", target))
    assert back.format.name == target.removesuffix("_v2") and getattr(back.format, "version", 2) == 2
    for prefix, linear in linears.items():
        found = back.linear(prefix)
        assert torch.equal(found.codes, linear.codes) and torch.equal(found.zeros, linear.zeros)
        assert torch.equal(found.scales, linear.scales)


def test_dequantized(tiny, quantized, tmp_path):
    path, linears = quantized(tiny(), AwqFormat(QuantScheme(4, 64, False)))
    back = open_checkpoint(rewrite(convert_checkpoint(path, tmp_path / "store").path, tmp_path / "hf", "hf"))
    assert back.scheme is None and "quantization_config" not in back.config
    for prefix, linear in linears.items():
        assert torch.equal(back.tensor(f"{prefix}.weight"), linear.dequantize().half())


def test_what_is_dense_in_a_quantized_model_stays_dense(tiny, quantized, tmp_path):
    down = "model.layers.0.mlp.down_proj"
    path, _ = quantized(tiny(), GptqFormat(QuantScheme(4, 32, False), 2, {f"-:{down}$": {}}), keep=(down,))
    convert_checkpoint(path, tmp_path / "store")
    for target in ("awq", "gptq_v2", "compressed-tensors"):
        back = open_checkpoint(rewrite(tmp_path / "store", tmp_path / target, target))
        assert torch.equal(back.tensor(f"{down}.weight"), open_checkpoint(path).tensor(f"{down}.weight"))
        assert down in json.dumps(back.config["quantization_config"]).replace("\\", "")
        convert_checkpoint(tmp_path / target, tmp_path / f"{target}-again")
        assert diff(tmp_path / "store", tmp_path / f"{target}-again").same


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(tiny, quantized, tmp_path):
    dense = tiny()
    with pytest.raises(UsageError, match=r"--to awq: .* is not quantized; see `turbomill lite`"):
        rewrite(dense, tmp_path / "x", "awq")
    path, linears = quantized(tiny("b"), AwqFormat(QuantScheme(4, 32, False)))
    assert not all(bool(linear.zeros.all()) for linear in linears.values())
    with pytest.raises(CheckpointError, match=r"has a zero of 0, .* use --to gptq_v2"):
        rewrite(path, tmp_path / "x", "gptq")
    mixed = {prefix: QuantScheme(4, 32 if "mlp" in prefix else 64, False) for prefix in linears}
    path, _ = quantized(tiny("c"), CompressedTensorsFormat.mixed(mixed))
    with pytest.raises(UsageError, match=r"--to awq: the linears have 2 schemes .*compressed-tensors alone"):
        rewrite(convert_checkpoint(path, tmp_path / "store").path, tmp_path / "x", "awq")
    same_tensors(path, rewrite(tmp_path / "store", tmp_path / "ct", "compressed-tensors"))
    path, _ = quantized(tiny("d"), GptqFormat(QuantScheme(3, 32, False), 2))
    with pytest.raises(UsageError, match=r"codes of 3 bits; use --to gptq or gptq_v2 or compressed-tensors"):
        rewrite(path, tmp_path / "x", "awq")
    path, _ = quantized(tiny("e"), GptqFormat(QuantScheme(4, 128, False), 2))
    with pytest.raises(UsageError, match=r"mlp.down_proj: AWQ gemm needs K divisible by the group"):
        rewrite(path, tmp_path / "x", "awq")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".x*"))


def test_only_what_this_program_wrote_is_replaced(tiny, tmp_path):
    convert_checkpoint(tiny(), tmp_path / "store")
    with pytest.raises(UsageError, match="is not a checkpoint of turbomill's"):
        rewrite(tmp_path / "store", tiny("other"), "hf", force=True)
    rewrite(tmp_path / "store", tmp_path / "back", "hf")
    with pytest.raises(UsageError, match="exists; give --force"):
        rewrite(tmp_path / "store", tmp_path / "back", "hf")
    rewrite(tmp_path / "store", tmp_path / "back", "hf", force=True)
    with pytest.raises(UsageError, match="lies in the checkpoint"):
        rewrite(tmp_path / "store", tmp_path / "store" / "in", "hf")
