"""Checkpoints of any size with random weights: benchmarks need a model's shape, not its sense."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.models.base import find_architecture
from turbomill.convert.writer import CheckpointWriter
from turbomill.errors import UsageError

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}
PIECE = 1 << 24  # random elements before they repeat


def shape_config(name: str) -> dict[str, Any]:
    """config.json of a shape. Raises UsageError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise UsageError(f"--random {name}: expected one of {', '.join(SHAPES)}")
    return dict(SHAPES[name])


def write_random_checkpoint(dst: Path, config: Mapping[str, Any], bits: int = 16) -> Path:
    """A checkpoint in `dst`: bf16, or AWQ of group 128 with fp16 scales where `bits` is 4."""
    if bits not in (4, 16):
        raise UsageError(f"--w-bits {bits}: random checkpoints have 4 or 16")
    arch = find_architecture(dict(config))
    form: WeightFormat = AwqFormat(QuantScheme(4, 128, False)) if bits == 4 else DenseFormat()
    described = form.quantization_config()
    config = {**config, "quantization_config": described} if described else dict(config)
    dtype = torch.float16 if bits == 4 else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(PIECE, dtype=dtype).normal_(std=0.02, generator=generator)
    words = torch.randint(-(2**31), 2**31, (PIECE,), dtype=torch.int64, generator=generator).int()
    shapes = arch.linear_shapes(dict(config))
    prefixes = arch.linear_prefixes(dict(config))
    with CheckpointWriter(dst, config) as writer, console.progress("random weights", len(prefixes)) as task:
        for name, shape in arch.other_weights(dict(config)).items():
            writer.add(name, _tiled(values, shape).abs() + 1 if len(shape) == 1 else _tiled(values, shape))
        for index in range(arch.num_layers(dict(config))):
            for linear in arch.linears_of(dict(config), index):
                prefix = arch.layer(index) + linear
                for name, shape in form.expected(prefix, *shapes[linear]).items():
                    packed = name.endswith(("qweight", "qzeros"))
                    tensor = _tiled(words if packed else values, shape)
                    writer.add(name, tensor.abs() + 1e-3 if name.endswith("scales") else tensor)
                task.advance()
    return dst


def _tiled(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`shape` filled with `values`, again and again."""
    count = torch.Size(shape).numel()
    return values.repeat(-(-count // len(values)))[:count].reshape(shape)
