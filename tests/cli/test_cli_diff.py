"""`turbomill diff`: equal models of every kind compare equal, and what differs is named and measured."""

import json

import pytest
from architectures import CASES

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.diff import diff
from turbomill.convert.rewrite import rewrite
from turbomill.convert.store import convert_checkpoint
from turbomill.quant import QuantOptions, quantize


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "internlm2", "qwen2-moe", "baichuan2", "glm4"])
def test_a_checkpoint_equals_its_store(name, tmp_path):
    CASES[name].make(tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "store")
    found = diff(tmp_path / "model", tmp_path / "store")
    assert found.same and found.equal > 10, found


def test_rounding_is_measured_linear_by_linear(turbomill, tiny, tmp_path):
    work = quantize(tiny, tmp_path / "q", "rtn", QuantOptions(group=32)).work_dir
    result = turbomill("diff", tiny, work, "--json")
    assert result.returncode == 1
    found = json.loads(result.stdout)
    lines = {line["name"]: line for line in found["tensors"]}
    assert len(lines) == 2 * 7 and not found["same"]  # the linears of both layers, nothing else
    name = "model.layers.1.mlp.down_proj"
    line = lines[f"{name}.weight"]
    assert line["a"] == "float16" and line["b"] == "w4g32asym"
    a, b = (open_checkpoint(path).linear(name).dequantize() for path in (tiny, work))
    assert line["relative"] == pytest.approx(float((a - b).square().sum() / a.square().sum()), rel=1e-4)
    assert line["largest"] == pytest.approx(float((a - b).abs().max()))
    # The same weights, stored in another way, are equal.
    rewrite(work, tmp_path / "dense", "hf")
    assert turbomill("diff", tiny, tiny).returncode == 0
    again = diff(work, tmp_path / "dense")
    assert all(line.largest < 1e-3 for line in again.tensors)  # dense in fp16: rounded once more


def test_sizes_and_architectures(turbomill, tiny, tmp_path):
    CASES["qwen3"].make(tmp_path / "other")
    result = turbomill("diff", tiny, tmp_path / "other")
    assert result.returncode == 1 and "nothing to compare" in result.stderr
