"""What the store of a checkpoint will hold, decided from headers alone, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.linear import DenseLinear, QuantLinear, QuantScheme, storable_scales
from turbomill.convert.models.base import Fusion
from turbomill.convert.safetensors_io import DTYPES, TAGS
from turbomill.convert.store.fuse import fuse
from turbomill.convert.store.layout import (
    DENSE,
    GROUP,
    TILE,
    VECTOR,
    W4,
    pack_groups,
    pack_w4,
    padded,
    stored_group,
)
from turbomill.errors import CheckpointError, UnsupportedModelError

GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Planned:
    """One tensor to be written."""

    name: str
    layout: str
    tag: str  # safetensors dtype tag
    shape: tuple[int, ...]  # stored
    logical: tuple[int, ...]
    group: int | None = None

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return prod(self.shape) * DTYPES[self.tag].itemsize


@dataclass(frozen=True)
class Step:
    """Tensors that are made together, from one read of the source."""

    tensors: tuple[Planned, ...]
    build: Callable[[], list[Tensor]]  # in the order of `tensors`


def plan_store(checkpoint: Checkpoint) -> list[Step]:
    """Every tensor of the store, in forward order. The checkpoint has passed `check_tensors`."""
    arch, config = checkpoint.arch, checkpoint.config
    steps = [
        _matrix(checkpoint, "tok_embeddings.weight", arch.embedding),
        Step(
            (Planned("rope.inv_freq", VECTOR, "F32", (n := arch.rope_inv_freq(config).numel(),), (n,)),),
            lambda: [arch.rope_inv_freq(config)],
        ),
    ]
    for index in range(arch.num_layers(config)):
        for norm, stored in arch.norms.items():
            source = f"{arch.layer(index)}{norm}.weight"
            steps.append(_vector(checkpoint, f"layers.{index}.{stored}.weight", source))
        steps += [_linear(checkpoint, index, fusion) for fusion in arch.fusions]
    steps.append(_vector(checkpoint, "norm.weight", arch.final_norm))
    if not checkpoint.tied:
        steps.append(_matrix(checkpoint, "output.weight", arch.head))
    return steps


def _vector(checkpoint: Checkpoint, name: str, source: str) -> Step:
    shape = checkpoint.shape(source)
    planned = Planned(name, VECTOR, TAGS[checkpoint.dtype_of(source)], shape, shape)
    return Step((planned,), lambda: [checkpoint.tensor(source)])


def _matrix(checkpoint: Checkpoint, name: str, source: str) -> Step:
    shape = checkpoint.shape(source)
    planned = Planned(name, DENSE, TAGS[checkpoint.dtype_of(source)], shape, shape)
    return Step((planned,), lambda: [checkpoint.tensor(source)])


def _linear(checkpoint: Checkpoint, index: int, fusion: Fusion) -> Step:
    arch = checkpoint.arch
    name = f"layers.{index}.{fusion.name}"
    sizes = arch.linear_shapes(checkpoint.config)
    k, n = sizes[fusion.parts[0]][0], sum(sizes[part][1] for part in fusion.parts)
    prefixes = [arch.layer(index) + part for part in fusion.parts]
    if fusion.interleave and any(sizes[part][1] % fusion.interleave for part in fusion.parts):
        raise UnsupportedModelError(
            f"{prefixes[0]}: {sizes[fusion.parts[0]][1]} rows are not a multiple of {fusion.interleave}, "
            "which the fused SiLU needs"
        )
    schemes = {checkpoint.format_of(prefix).scheme_of(prefix, k) for prefix in prefixes}
    if len(schemes) != 1:
        found = ", ".join(sorted(map(str, schemes)))
        raise CheckpointError(
            f"{name}: {', '.join(fusion.parts)} are fused, so they need one scheme, but have {found}"
        )
    scheme = schemes.pop()
    biases = [f"{prefix}.bias" for prefix in prefixes if checkpoint.has(f"{prefix}.bias")]
    bias: tuple[Planned, ...] = ()
    if biases:
        bias = (Planned(f"{name}.bias", VECTOR, TAGS[checkpoint.dtype_of(biases[0])], (n,), (n,)),)

    def load() -> DenseLinear | QuantLinear:
        return fuse(name, fusion, [checkpoint.linear(prefix) for prefix in prefixes])

    if scheme is None:
        tag = TAGS[checkpoint.dtype_of(f"{prefixes[0]}.weight")]
        weight = Planned(f"{name}.weight", DENSE, tag, (n, k), (n, k))
        return Step((weight, *bias), lambda: list(_dense_tensors(load())))
    _check_scheme(name, scheme, k)
    group = stored_group(scheme.group, k)
    tag = TAGS[_scale_dtype(checkpoint.dtype_of(f"{prefixes[0]}.scales"))]
    tiles = (padded(n) // TILE, padded(k) // TILE, 4, 32, 16)
    groups = (padded(n) // TILE, padded(k) // group, TILE)
    logical = (n, k)
    planned = [
        Planned(f"{name}.qweight", W4, "U8", tiles, logical, group),
        Planned(f"{name}.scales", GROUP, tag, groups, logical, group),
    ]
    if not scheme.symmetric:
        planned.append(Planned(f"{name}.zeros", GROUP, tag, groups, logical, group))
    return Step((*planned, *bias), lambda: list(_quant_tensors(name, load())))


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def _check_scheme(name: str, scheme: QuantScheme, k: int) -> None:
    if scheme.bits != 4:
        raise UnsupportedModelError(
            f"{name}: {scheme.bits}-bit weights have no store layout; supported: 4 bits, or a dense model"
        )
    if scheme.group not in GROUPS and scheme.group < k:
        raise UnsupportedModelError(
            f"{name}: group {scheme.group} has no store layout; supported: 32, 64, 128 and K ({k})"
        )


def _dense_tensors(linear: DenseLinear | QuantLinear) -> Iterator[Tensor]:
    assert isinstance(linear, DenseLinear)
    yield linear.weight
    if linear.bias is not None:
        yield linear.bias


def _quant_tensors(name: str, linear: DenseLinear | QuantLinear) -> Iterator[Tensor]:
    assert isinstance(linear, QuantLinear)
    k, _ = linear.shape
    scales = storable_scales(name, linear.scales)
    yield pack_w4(linear.codes)
    yield pack_groups(scales, linear.scheme.group, k)
    if not linear.scheme.symmetric:
        yield pack_groups(linear.zeros.to(scales.dtype), linear.scheme.group, k)
    if linear.bias is not None:
        yield linear.bias
