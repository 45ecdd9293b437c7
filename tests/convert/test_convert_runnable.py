"""InternLM2, InternLM3 and Baichuan as the Llama that runs them, and back."""

import pytest
import torch
from architectures import CASES
from quantized_models import nearest

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.runnable import RunnableCheckpoint, runnable
from turbomill.convert.writer import CheckpointWriter

REMOTE = ["internlm2", "internlm3", "baichuan", "baichuan2"]


@pytest.mark.parametrize("name", REMOTE)
def test_the_reference_is_the_model(name, tmp_path):
    model = CASES[name].make(tmp_path / "m")
    ids = torch.randint(3, 320, (1, 40))
    with torch.no_grad():
        logits = load_dense_model(open_checkpoint(tmp_path / "m"))(ids).logits
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*REMOTE, "mixtral"])
def test_every_tensor_is_there_once_and_goes_back(name, tmp_path):
    CASES[name].make(tmp_path / "m")
    published = open_checkpoint(tmp_path / "m")
    view = runnable(published)
    assert isinstance(view, RunnableCheckpoint)
    arch, config = view.arch, view.config
    wanted = dict(arch.other_weights(config))
    for index in range(3):
        for linear in arch.linears_of(config, index):
            k, n = arch.linear_shapes(config)[linear]
            wanted[f"{arch.layer(index)}{linear}.weight"] = (n, k)
            if arch.linear_biases(config)[linear]:
                wanted[f"{arch.layer(index)}{linear}.bias"] = (n,)
    assert {name: view.shape(name) for name in view.names()} == wanted
    assert all(tuple(view.tensor(name).shape) == shape for name, shape in wanted.items())
    for index in range(3):
        for linear in published.arch.linears_of(published.config, index):
            parts = [view.linear(f"{arch.layer(index)}{part}") for part in view.parts_of(linear)]
            joined, original = view.join(linear, parts), published.linear(arch.layer(index) + linear)
            assert torch.equal(joined.weight, original.weight)
            biases = [
                torch.zeros(len(joined.weight)) if b is None else b for b in (joined.bias, original.bias)
            ]
            assert torch.equal(*biases)


def test_an_architecture_with_its_own_code_is_itself(tmp_path):
    CASES["qwen2"].make(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    view = runnable(checkpoint)
    assert view.names() == checkpoint.names() and view.arch is checkpoint.arch
    assert view.parts_of("mlp.up_proj") == ("mlp.up_proj",)


@pytest.mark.parametrize("name", ["internlm2", "baichuan"])
def test_quantized_parts_are_the_rows_of_the_whole(name, tmp_path):
    CASES[name].make(tmp_path / "m", torch.float16)
    dense, form = open_checkpoint(tmp_path / "m"), AwqFormat(QuantScheme(4, 32, False))
    linears = set(dense.arch.linear_prefixes(dense.config))
    config = {**dense.config, "quantization_config": form.quantization_config()}
    with CheckpointWriter(tmp_path / "q", config) as writer:
        for tensor in dense.names():
            prefix, _, kind = tensor.rpartition(".")
            if prefix not in linears or kind == "bias":
                writer.add(tensor, dense.tensor(tensor))
                continue
            packed = form.pack(prefix, nearest(dense.tensor(tensor), form.scheme, torch.float16))
            for key, value in packed.items():
                writer.add(key, value)
    published = open_checkpoint(tmp_path / "q")
    view = runnable(published)
    for linear in published.arch.linears_of(published.config, 1):
        parts = [view.linear(f"{view.arch.layer(1)}{part}") for part in view.parts_of(linear)]
        original = published.linear(f"{published.arch.layer(1)}{linear}")
        assert torch.equal(view.join(linear, parts).dequantize(), original.dequantize())
