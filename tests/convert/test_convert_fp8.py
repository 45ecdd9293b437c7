"""fp8 checkpoints with a scale for each block: what they stand for, block by block, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.describe import describe
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import convert_checkpoint
from turbomill.convert.store.verify import check_tensors_against
from turbomill.errors import CheckpointError, UnsupportedModelError
from turbomill.quant.checks import check_dense

QUANT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fp8(path: Path, scale_dtype: torch.dtype = torch.float32, **changes) -> dict[str, torch.Tensor]:
    """The checkpoint's linears in fp8, in place, as DeepSeek does it; returns what they stand for."""
    tensors = load_file(path / "model.safetensors")
    stands_for = {}
    for name in [name for name in tensors if name.split(".")[-2] in LINEARS]:
        weight = tensors[name].float()
        n, k = weight.shape
        scales = torch.zeros(-(-n // 128), -(-k // 128))
        stored, value = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                scales[i, j] = (weight[block].abs().max() / 448).to(scale_dtype)
                stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                value[block] = stored[block].float() * scales[i, j]
        tensors[name], tensors[f"{name}_scale_inv"] = stored, scales.to(scale_dtype)
        stands_for[name] = value.bfloat16()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANT | changes}))
    return stands_for


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_become_bf16(tiny, tmp_path, scale_dtype):
    path = tiny(dtype=torch.bfloat16, hidden_size=192, intermediate_size=320, num_attention_heads=6)
    expected = fp8(path, scale_dtype)
    checkpoint = open_checkpoint(path)
    assert checkpoint.scheme is None and not [name for name in checkpoint.names() if "scale" in name]
    for name, value in expected.items():
        assert checkpoint.dtype_of(name) == torch.bfloat16 and not checkpoint.has(f"{name}_scale_inv")
        assert torch.equal(checkpoint.tensor(name), value), name
        assert checkpoint.stored(name)[1] == "float8_e4m3fn"
    check_dense(checkpoint)  # `turbomill lite` takes it
    store = convert_checkpoint(path, tmp_path / "store")
    assert check_tensors_against(store, checkpoint).ok
    assert torch.equal(
        store.linear("layers.1.w_down").weight, expected["model.layers.1.mlp.down_proj.weight"]
    )
    said = "fp8 e4m3 in blocks of 128 x 128, dequantized to bfloat16"
    assert store.manifest["source"]["note"] == said
    assert describe(path).note == describe(store.path).note == said
    model = load_dense_model(checkpoint)
    assert torch.equal(
        model.model.layers[0].mlp.up_proj.weight, expected["model.layers.0.mlp.up_proj.weight"].float()
    )


def test_modules_left_in_16_bits(tiny):
    path = tiny(dtype=torch.bfloat16)
    dense = load_file(path / "model.safetensors")
    fp8(path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: dense[name]}, path / "model.safetensors")
    assert torch.equal(open_checkpoint(path).tensor(name), dense[name])


def test_unsound_fp8_is_one_line(tiny):
    path = tiny(dtype=torch.bfloat16)
    fp8(path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    for change, words in (
        ({name: torch.ones(7, 1)}, r"up_proj\.weight_scale_inv is \[7, 1\], expected \[2, 1\]"),
        ({name: None}, r"up_proj\.weight is fp8, but there is no"),
    ):
        save_file({k: v for k, v in (tensors | change).items() if v is not None}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words) as error:
            open_checkpoint(path)
        assert "\n" not in str(error.value)
    save_file(tensors | {name: torch.full((2, 1), torch.nan)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: holds inf or NaN"):
        open_checkpoint(path).tensor("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight_block_size": None}, UnsupportedModelError, "without weight_block_size"),
        ({"weight_block_size": 128}, CheckpointError, "weight_block_size 128, expected"),
        ({"fmt": "e5m2"}, UnsupportedModelError, "fp8 of fmt e5m2"),
    ],
)
def test_other_fp8_is_refused(tiny, change, error, words):
    path = tiny(dtype=torch.bfloat16)
    fp8(path, **change)
    with pytest.raises(error, match=words):
        open_checkpoint(path)
