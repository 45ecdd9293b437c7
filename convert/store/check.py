"""Whether a checkpoint has every tensor its config promises, no others, and each of the right shape."""

from __future__ import annotations

import re

import torch

from turbomill.convert.checkpoint import Checkpoint
from turbomill.errors import CheckpointError

SHOWN = 12
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")
WHOLE = (".g_idx", ".weight_g_idx", ".weight_shape")
# Buffers that old checkpoints saved; they are computed.
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise one CheckpointError that lists every missing, left-over and wrongly shaped tensor."""
    problems: list[str] = []
    known: set[str] = set()

    arch, config = checkpoint.arch, checkpoint.config

    def expect(name: str, shape: tuple[int, ...]) -> None:
        known.add(name)
        if not checkpoint.has(name):
            tied = "; tie_word_embeddings is false" if name == arch.head else ""
            problems.append(f"{name} is missing{tied}")
        elif checkpoint.shape(name) != shape:
            problems.append(f"{name} is {list(checkpoint.shape(name))}, expected {list(shape)}")
        elif wrong := _wrong_dtype(name, checkpoint.dtype_of(name)):
            problems.append(wrong)

    for name, shape in arch.other_weights(config).items():
        expect(name, shape)
    shapes, biases = arch.linear_shapes(config), arch.linear_biases(config)
    for index in range(arch.num_layers(config)):
        for linear in arch.linears_of(config, index):
            k, n = shapes[linear]
            prefix = arch.layer(index) + linear
            form = checkpoint.format_of(prefix)
            for name, shape in form.expected(prefix, k, n).items():
                expect(name, shape)
            known.update(form.optional(prefix))
            found = (name for name in form.optional(prefix) if checkpoint.has(name))
            problems += filter(None, (_wrong_dtype(name, checkpoint.dtype_of(name)) for name in found))
            if biases[linear] or _is_spare_bias(checkpoint, f"{prefix}.bias"):
                expect(f"{prefix}.bias", (n,))
    if checkpoint.tied and checkpoint.has(arch.head):
        known.add(arch.head)
        if checkpoint.has(arch.embedding) and not torch.equal(
            checkpoint.tensor(arch.head), checkpoint.tensor(arch.embedding)
        ):
            problems.append(f"{arch.head} differs from {arch.embedding}, though tie_word_embeddings is true")
    problems += [
        f"{name} is not part of {arch.name}"
        for name in checkpoint.names()
        if name not in known and not IGNORED.search(name)
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(problems[:SHOWN])}{more}")


def _wrong_dtype(name: str, dtype: torch.dtype) -> str:
    if name.endswith(WORDS):
        expected: tuple[torch.dtype, ...] = (torch.int32,)
    else:
        expected = (torch.int32, torch.int64) if name.endswith(WHOLE) else FLOATS
    names = " or ".join(str(kind).removeprefix("torch.") for kind in expected)
    return "" if dtype in expected else f"{name} is {str(dtype).removeprefix('torch.')}, expected {names}"


def _is_spare_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Some GPTQ writers give every linear a bias of zeros."""
    return checkpoint.has(name) and not bool(checkpoint.tensor(name).any())
