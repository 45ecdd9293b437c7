"""Padding the MLPs with zeros changes no logit, whatever the architecture."""

import pytest
import torch
from architectures import CASES

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.padded import PaddedCheckpoint, padded_sizes
from turbomill.convert.reference import load_dense_model
from turbomill.convert.runnable import runnable

SIZES = {"intermediate_size": 120, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72}


@pytest.mark.parametrize(
    "name", ["qwen2", "phi3", "glm", "gemma2", "internlm2", "baichuan2", "mixtral", "qwen2-moe"]
)
def test_logits_stay(name, tmp_path):
    model = CASES[name].make(tmp_path / "m", **SIZES)
    source = open_checkpoint(tmp_path / "m")
    padded = PaddedCheckpoint(source, padded_sizes(source.config, 64))
    assert padded.config["intermediate_size"] == 128 and source.config["intermediate_size"] == 120
    assert padded.sizes.get("moe_intermediate_size", 64) == 64
    shapes = padded.arch.linear_shapes(padded.config)
    for index in range(3):
        for linear in padded.arch.linears_of(padded.config, index):
            k, n = shapes[linear]
            prefix = f"{padded.arch.layer(index)}{linear}"
            assert padded.shape(f"{prefix}.weight") == padded.tensor(f"{prefix}.weight").shape == (n, k)
    view = runnable(padded)
    assert view.tensor(view.names()[5]).shape == view.shape(view.names()[5])
    ids = torch.randint(3, 320, (1, 30))
    with torch.no_grad():
        torch.testing.assert_close(
            load_dense_model(padded)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_what_fits_is_left_alone(tmp_path):
    CASES["qwen3-moe"].make(tmp_path / "m")
    source = open_checkpoint(tmp_path / "m")
    padded = PaddedCheckpoint(source, padded_sizes(source.config, 32))
    assert padded.sizes == {} and padded.config == padded.source.config
