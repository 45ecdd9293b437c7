"""What the store of a checkpoint will hold, decided from headers alone, before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from turbomill.convert import native
from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import DenseLinear, QuantGrid, QuantLinear, QuantScheme
from turbomill.convert.models.base import Fusion
from turbomill.convert.safetensors_io import DTYPES, TAGS
from turbomill.convert.store.fuse import fuse, fuse_grids, pack_joined, reorder
from turbomill.convert.store.layout import (
    DENSE,
    GROUP,
    PACKED,
    TILE,
    VECTOR,
    pack_codes,
    pack_groups,
    padded,
    stored_group,
    tile_shape,
)
from turbomill.convert.store.made import Codes, Made, Whole
from turbomill.convert.store.scheme import as_stored, grid_as_stored, stored_scheme
from turbomill.errors import CheckpointError, UnsupportedModelError

log = logging.getLogger("turbomill.convert")


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
    """Tensors that are made together, from one read of the source.

    With `experts`, the tensors have a leading dimension of that many, and are made one expert at a time.
    """

    tensors: tuple[Planned, ...]
    build: Callable[[int], list[Made]]  # expert (else 0) -> its part of each of `tensors`, in their order
    experts: int = 0


def plan_store(checkpoint: Checkpoint) -> list[Step]:
    """Every tensor of the store, in forward order. The checkpoint has passed `check_tensors`."""
    arch, config = checkpoint.arch, checkpoint.config
    steps = [_matrix(checkpoint, "tok_embeddings.weight", arch.embedding)]
    for name, table in {"rope": arch.rope_inv_freq(config), **arch.rope_tables(config)}.items():
        planned = Planned(f"{name}.inv_freq", VECTOR, "F32", tuple(table.shape), tuple(table.shape))
        steps.append(Step((planned,), lambda _e, table=table: [Whole(table)]))
    for index in range(arch.num_layers(config)):
        for norm, stored in {**arch.norms, **arch.head_norms}.items():
            source = f"{arch.layer(index)}{norm}.weight"
            steps.append(_norm(checkpoint, f"layers.{index}.{stored}.weight", source))
        for name, (stored, _) in arch.matrices(config, index).items():
            source = f"{arch.layer(index)}{name}.weight"
            steps.append(_matrix(checkpoint, f"layers.{index}.{stored}.weight", source))
        steps += [_linear(checkpoint, index, fusion) for fusion in arch.fusions_of(config, index)]
    steps.append(_norm(checkpoint, "norm.weight", arch.final_norm))
    if not checkpoint.tied:
        steps.append(_matrix(checkpoint, "output.weight", arch.head, arch.head_transform))
    return steps


def _norm(checkpoint: Checkpoint, name: str, source: str) -> Step:
    """As it is, or in fp32 with the offset added: 16 bits would round what the sum has beyond 1."""
    shape, offset = checkpoint.shape(source), checkpoint.arch.norm_offset
    tag = "F32" if offset else TAGS[checkpoint.dtype_of(source)]

    def build(_expert: int) -> list[Made]:
        weight = checkpoint.tensor(source)
        return [Whole(weight.float() + offset if offset else weight)]

    return Step((Planned(name, VECTOR, tag, shape, shape),), build)


def _matrix(
    checkpoint: Checkpoint, name: str, source: str, change: Callable[[Tensor], Tensor] | None = None
) -> Step:
    prefix = source.removesuffix(".weight")
    table = None if change is not None else _table(checkpoint, name.removesuffix(".weight"), prefix)
    if table is not None:
        return table
    shape = checkpoint.shape(source)
    planned = Planned(name, DENSE, TAGS[checkpoint.dtype_of(source)], shape, shape)

    def build(_expert: int) -> list[Made]:
        tensor = checkpoint.tensor(source)
        return [Whole(tensor if change is None else change(tensor))]

    return Step((planned,), build)


def _table(checkpoint: Checkpoint, name: str, prefix: str) -> Step | None:
    """The embedding or the output matrix where the checkpoint has codes of it that a layout holds."""
    if not checkpoint.has(f"{prefix}.weight"):
        return None
    n, k = checkpoint.shape(f"{prefix}.weight")
    form = checkpoint.format_of(prefix)
    scheme = stored_scheme([form.scheme_of(prefix, k)], k)
    if scheme is None or form.order(checkpoint, prefix) is not None:
        return None
    dtype = _value_dtype(checkpoint, [prefix], packed=True)

    def build(_expert: int) -> list[Made]:
        return list(map(Whole, _quant_tensors(as_stored(prefix, checkpoint.linear(prefix), scheme, dtype))))

    return Step(tuple(_packed(name, scheme, TAGS[dtype], (n, k))), build)


def _packed(name: str, scheme: QuantScheme, tag: str, logical: tuple[int, ...]) -> list[Planned]:
    """Codes, and the values beside them, of a linear [N, K], or of experts [E, N, K]."""
    *stack, n, k = logical
    group = stored_group(scheme.group, k)
    tiles = (*stack, padded(n) // TILE, padded(k) // TILE, *tile_shape(scheme.bits))
    groups = (*stack, padded(n) // TILE, padded(k) // group, TILE)
    found = [
        Planned(f"{name}.qweight", PACKED[scheme.bits], "U8", tiles, logical, group),
        Planned(f"{name}.scales", GROUP, tag, groups, logical, group),
    ]
    beside = "mins" if scheme.mins else "" if scheme.symmetric else "zeros"
    return [*found, Planned(f"{name}.{beside}", GROUP, tag, groups, logical, group)] if beside else found


def _linear(checkpoint: Checkpoint, index: int, fusion: Fusion) -> Step:
    arch = checkpoint.arch
    name = f"layers.{index}.{fusion.name}"
    sizes = arch.linear_shapes(checkpoint.config)
    experts = arch.num_experts(checkpoint.config) if fusion.of_experts else 0
    stack = (experts,) if experts else ()
    first = fusion.names()
    k, n = sizes[first[0]][0], sum(sizes[part][1] for part in first)
    if fusion.interleave and any(sizes[part][1] % fusion.interleave for part in first):
        raise UnsupportedModelError(
            f"{arch.layer(index)}{first[0]}: {sizes[first[0]][1]} rows are not a multiple of "
            f"{fusion.interleave}, which the fused SiLU needs"
        )
    order = fusion.order(checkpoint.config) if fusion.order else None

    def prefixes(expert: int) -> list[str]:
        return [arch.layer(index) + part for part in fusion.names(expert)]

    everything = [prefix for expert in range(max(experts, 1)) for prefix in prefixes(expert)]
    schemes = {checkpoint.format_of(prefix).scheme_of(prefix, k) for prefix in everything}
    scheme = stored_scheme(list(schemes), k)
    rows = _order(checkpoint, everything)
    if rows is not None and (experts or rows.numel() == 0):
        scheme = None  # an order of its own for each part, or expert, has no layout
    dtype = _value_dtype(checkpoint, everything, packed=scheme is not None)
    if scheme is None and schemes != {None}:
        log.info(
            "%s: %s has no packed layout, stored dense in %s",
            *(name, " + ".join(sorted(str(found or "dense") for found in schemes)), dtype),
        )
    biases = [f"{prefix}.bias" for prefix in everything if checkpoint.has(f"{prefix}.bias")]
    if biases and experts:
        raise UnsupportedModelError(f"{biases[0]}: experts with a bias are not supported")
    bias: tuple[Planned, ...] = ()
    if biases:
        bias = (Planned(f"{name}.bias", VECTOR, TAGS[checkpoint.dtype_of(biases[0])], (n,), (n,)),)

    def load(expert: int) -> list[DenseLinear | QuantLinear]:
        return [as_stored(prefix, checkpoint.linear(prefix), scheme, dtype) for prefix in prefixes(expert)]

    def dense(expert: int) -> list[Made]:
        return list(map(Whole, _dense_tensors(reorder(fuse(name, fusion, load(expert)), order))))

    def packed(expert: int) -> list[Made]:
        if order is not None:
            return list(map(Whole, _quant_tensors(reorder(fuse(name, fusion, load(expert)), order))))
        found = _in_words(checkpoint, prefixes(expert), name, fusion, scheme, dtype) if scheme else None
        return found or list(map(Whole, _fused_tensors(name, fusion, load(expert))))

    logical = (*stack, n, k)
    if scheme is None:
        weight = Planned(f"{name}.weight", DENSE, TAGS[dtype], logical, logical)
        return Step((weight, *bias), dense, experts)
    planned = _packed(name, scheme, TAGS[dtype], logical)
    if rows is not None:
        planned.append(Planned(f"{name}.order", VECTOR, "I32", (k,), (k,)))
    return Step((*planned, *bias), packed, experts)


def _order(checkpoint: Checkpoint, prefixes: list[str]) -> Tensor | None:
    """The order of inputs that all the linears' rows are in; empty when they differ, None when plain."""
    orders = [checkpoint.format_of(prefix).order(checkpoint, prefix) for prefix in prefixes]
    if all(order is None for order in orders):
        return None
    known = [order for order in orders if order is not None]
    same = len(known) == len(orders) and all(torch.equal(order, known[0]) for order in known)
    return known[0] if same else torch.empty(0, dtype=torch.int32)


def _value_dtype(checkpoint: Checkpoint, prefixes: list[str], packed: bool) -> torch.dtype:
    """The dtype that a fused linear's weights, or scales, are stored in. fp32 scales are narrowed to fp16."""
    half = (torch.float16, torch.bfloat16)
    found: set[torch.dtype] = set()
    for prefix in prefixes:
        form = checkpoint.format_of(prefix)
        dtype = form.dtype(checkpoint, prefix)
        found.add(dtype if dtype in half or form.scheme is None else torch.float16)
    if len(found) == 1:
        return found.pop()
    if packed:
        names = ", ".join(sorted(map(str, found)))
        raise CheckpointError(f"{prefixes[0]}: is fused with linears whose scales differ in dtype: {names}")
    return torch.float32


def _dense_tensors(linear: DenseLinear | QuantLinear) -> Iterator[Tensor]:
    assert isinstance(linear, DenseLinear)
    yield linear.weight
    if linear.bias is not None:
        yield linear.bias


def _quant_tensors(linear: DenseLinear | QuantLinear) -> Iterator[Tensor]:
    assert isinstance(linear, QuantLinear)
    yield pack_codes(linear.codes, linear.scheme.bits)
    yield from _beside_codes(linear.grid)


def _fused_tensors(name: str, fusion: Fusion, parts: Sequence[DenseLinear | QuantLinear]) -> Iterator[Tensor]:
    """Of parts that are fused as `fuse` does it, but for their codes, which are large."""
    quant = [part for part in parts if isinstance(part, QuantLinear)]
    assert len(quant) == len(parts)
    rest = fuse_grids(name, fusion, [part.grid for part in quant])
    yield pack_joined([part.codes for part in quant], fusion.interleave, rest.scheme.bits)
    yield from _beside_codes(rest)


def _in_words(
    checkpoint: Checkpoint,
    prefixes: Sequence[str],
    name: str,
    fusion: Fusion,
    scheme: QuantScheme,
    dtype: torch.dtype,
) -> list[Made] | None:
    """The same of parts whose codes can stay in the checkpoint's words until they are written; else None."""
    if scheme.bits != 4 or not native.available():
        return None
    parts: list[PackedLinear] = []
    for prefix in prefixes:
        part = checkpoint.packed(prefix)
        if part is None:
            return None
        parts.append(part)
    if len({part.packing for part in parts}) != 1:
        return None
    grids = [grid_as_stored(p, part.grid, scheme, dtype) for p, part in zip(prefixes, parts, strict=True)]
    codes = Codes(parts, fusion.interleave if len(parts) > 1 else 0)
    return [codes, *map(Whole, _beside_codes(fuse_grids(name, fusion, grids)))]


def _beside_codes(grid: QuantGrid) -> Iterator[Tensor]:
    yield pack_groups(grid.scales, grid.scheme.group, grid.k)
    if grid.mins is not None:
        yield pack_groups(grid.mins, grid.scheme.group, grid.k)
    elif not grid.scheme.symmetric:
        yield pack_groups(grid.zeros.to(grid.scales.dtype), grid.scheme.group, grid.k)
    if grid.order is not None:
        yield grid.order
    if grid.bias is not None:
        yield grid.bias
