"""Rows of a quantized linear whose groups are not neighbours (desc_act, actorder): sorted, they are.

Sorted rows meet their inputs in another order, which the linear then says (`QuantLinear.order`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turbomill.convert.linear import QuantLinear
from turbomill.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class RowOrder:
    """What a g_idx [K] says."""

    rows: Tensor | None = None  # the input of each sorted row, int32 [K]; None where none need moving
    groups: Tensor | None = None  # the stored group of each block of rows; None where it is its own


def order_of(name: str, g_idx: Tensor | None, group: int) -> RowOrder:
    """Read the tensor `name`. Raises CheckpointError or UnsupportedModelError if it makes no whole groups."""
    if g_idx is None:
        return RowOrder()
    k = g_idx.shape[0]
    found, block = g_idx.long(), torch.arange(k) // group
    if torch.equal(found, block):
        return RowOrder()
    groups = -(-k // group)
    if not bool(((found >= 0) & (found < groups)).all()):
        raise CheckpointError(f"{name}: names groups beyond the {groups} of K={k}, group {group}")
    first = found[::group]
    if torch.equal(found, first[block]) and first.unique().numel() == groups:
        return RowOrder(groups=first)
    rows = found.argsort(stable=True)
    if not torch.equal(found[rows], block):
        raise UnsupportedModelError(f"{name}: groups of other sizes than {group} are not supported")
    return RowOrder(rows=rows.int())


def require_plain(prefix: str, linear: QuantLinear, format_name: str) -> None:
    """Raise CheckpointError for what only a store, or GGUF, has."""
    if linear.mins is not None:
        raise CheckpointError(
            f"{prefix}: {format_name} has no room for a group's minimum; dequantize (convert --dense)"
        )
    if linear.order is not None:
        raise CheckpointError(f"{prefix}: {format_name} has no room for inputs in another order")
