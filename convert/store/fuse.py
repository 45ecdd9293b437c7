"""Fusing linears along N: stacked ([Q|K|V]) or interleaved in blocks of rows (gate, up)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from turbomill.convert import native
from turbomill.convert.linear import DenseLinear, Linear, QuantGrid, QuantLinear
from turbomill.convert.models.base import Fusion
from turbomill.convert.store.layout import pack_codes
from turbomill.errors import CheckpointError


def join(parts: Sequence[Tensor], dim: int, block: int) -> Tensor:
    """Concatenate along `dim`, or interleave blocks of `block` (of equal parts) when it is not zero."""
    first, dim = parts[0], dim % parts[0].dim()
    if len(parts) == 1:
        return first
    if block and dim == first.dim() - 1 and first.dtype != torch.int64:
        wide = block * first.dtype.itemsize // 8
        if wide * 8 == block * first.dtype.itemsize and all(part.is_contiguous() for part in parts):
            # The same bytes, moved by eights.
            flat = [part.view(-1).view(torch.int64).view(*part.shape[:-1], -1) for part in parts]
            return join(flat, dim, wide).view(first.dtype)
    shape = [*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :]]
    out = _fresh(shape, first.dtype)
    if block == 0:
        return torch.cat(list(parts), dim, out=out)
    blocks = out.unflatten(dim, (-1, len(parts), block))
    for index, part in enumerate(parts):
        blocks.select(dim + 1, index).copy_(part.unflatten(dim, (-1, block)))
    return out


def pack_joined(parts: Sequence[Tensor], block: int, bits: int) -> Tensor:
    """`join` along N of codes [K, N] in the layout of `bits`. They meet only there, where that can be."""
    if bits == 4 and native.available():
        return native.pack_w4(parts, block if len(parts) > 1 else 0)
    return pack_codes(join(parts, 1, block), bits)


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor whose memory is NumPy's: it asks for huge pages, as small ones take longer than a copy."""
    return torch.from_numpy(np.empty(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).reshape(list(shape))


def split(whole: Tensor, dim: int, block: int, sizes: Sequence[int]) -> list[Tensor]:
    """The inverse of `join`; `sizes` are the parts' extents."""
    dim %= whole.dim()
    if block == 0 or len(sizes) == 1:
        return list(whole.split(list(sizes), dim))
    parts = whole.unflatten(dim, (-1, len(sizes), block))
    return [parts.select(dim + 1, i).flatten(dim, dim + 1) for i in range(len(sizes))]


def fuse(name: str, fusion: Fusion, parts: Sequence[Linear]) -> Linear:
    """One linear of `parts`, which share a scheme. A missing bias is zeros where another part has one."""
    block = fusion.interleave
    if all(isinstance(part, DenseLinear) for part in parts):
        weights = [part.weight for part in parts if isinstance(part, DenseLinear)]
        return DenseLinear(join(weights, 0, block), _fuse_bias(parts, block))
    quant = [part for part in parts if isinstance(part, QuantLinear)]
    if len(quant) != len(parts):
        raise _differ(name, fusion)
    grid = fuse_grids(name, fusion, [q.grid for q in quant])
    return grid.with_codes(join([q.codes for q in quant], 1, block))


def fuse_grids(name: str, fusion: Fusion, parts: Sequence[QuantGrid]) -> QuantGrid:
    """The same but for the codes."""
    block = fusion.interleave
    if len({(part.scheme, part.scales.dtype) for part in parts}) != 1:
        raise _differ(name, fusion)
    mins = [part.mins for part in parts if part.mins is not None]
    return QuantGrid(
        k=parts[0].k,
        scales=join([part.scales for part in parts], 1, block),
        zeros=join([part.zeros for part in parts], 1, block),
        scheme=parts[0].scheme,
        bias=_fuse_bias(parts, block),
        mins=join(mins, 1, block) if mins else None,
        order=parts[0].order,  # all parts', or the plan would not have put them together
    )


def _differ(name: str, fusion: Fusion) -> CheckpointError:
    return CheckpointError(f"{name}: {', '.join(fusion.parts)} are fused, but quantized differently")


def reorder(linear: Linear, order: Tensor | None) -> Linear:
    """The linear with row i taken from row `order[i]`; as it is when there is no order."""
    if order is None:
        return linear
    if isinstance(linear, DenseLinear):
        return DenseLinear(linear.weight[order], None if linear.bias is None else linear.bias[order])
    return linear.columns(order)


def _fuse_bias(parts: Sequence[Linear | QuantGrid], block: int) -> Tensor | None:
    dtype = next((part.bias.dtype for part in parts if part.bias is not None), None)
    if dtype is None:
        return None
    biases = [
        torch.zeros(_outputs(part), dtype=dtype) if part.bias is None else part.bias.to(dtype)
        for part in parts
    ]
    return join(biases, 0, block)


def _outputs(part: Linear | QuantGrid) -> int:
    return part.scales.shape[1] if isinstance(part, QuantGrid) else part.shape[1]
