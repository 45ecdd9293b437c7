"""What a fused linear is stored as, when its parts may be quantized differently.

The packed layouts hold codes of 4 and of 8 bits. Codes of fewer bits are codes of more bits too, and values
of a group can be repeated for its halves, so quantized parts always meet in one packed scheme without a
change of any weight. Everything else (a group with no layout, a dense part) is stored dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from turbomill.convert.linear import (
    DenseLinear,
    Linear,
    QuantGrid,
    QuantLinear,
    QuantScheme,
    all_finite,
    storable_scales,
)
from turbomill.convert.store.layout import PACKED
from turbomill.errors import CheckpointError

LARGEST, SMALLEST = 128, 32  # groups with a layout, beside all of K


def stored_scheme(schemes: Sequence[QuantScheme | None], k: int) -> QuantScheme | None:
    """The packed scheme that holds linears of K in-features exactly, or None: they are stored dense."""
    known = [scheme for scheme in schemes if scheme is not None]
    if not known or len(known) < len(schemes):
        return None
    mins = any(scheme.mins for scheme in known)
    if mins and not all(scheme.mins or scheme.symmetric for scheme in known):
        return None  # a zero times a scale is not always a 16-bit number
    groups = {0 if scheme.group >= k else scheme.group for scheme in known}  # 0: one group spans K
    group = gcd(*groups)
    if group and group not in (32, 64, 128):
        group = gcd(group, LARGEST)
        if group < SMALLEST:
            return None
    symmetric = not mins and all(scheme.symmetric for scheme in known)
    bits = min(size for size in PACKED if size >= max(scheme.bits for scheme in known))
    return QuantScheme(bits, group or k, symmetric, mins)


def as_stored(name: str, linear: Linear, scheme: QuantScheme | None, dtype: torch.dtype) -> Linear:
    """The same weights in the packed `scheme`, or dense in `dtype`. Scales are brought to `dtype`, zeros to
    the stored bits. Raises CheckpointError, naming the linear, for what `dtype` cannot hold."""
    if scheme is None:
        return DenseLinear(_dense(name, linear, dtype), linear.bias)
    assert isinstance(linear, QuantLinear)
    shift = _shift(linear.scheme, scheme)
    grid = grid_as_stored(name, linear.grid, scheme, dtype)
    return grid.with_codes(linear.codes + shift if shift else linear.codes)


def grid_as_stored(name: str, grid: QuantGrid, scheme: QuantScheme, dtype: torch.dtype) -> QuantGrid:
    """The same of what stands beside the codes. They stay as they are where they have the stored bits."""
    if scheme.mins:
        grid = grid.with_mins()
    shift = _shift(grid.scheme, scheme)
    return QuantGrid(
        k=grid.k,
        scales=_regrouped(storable_scales(name, grid.scales).to(dtype), grid, scheme.group),
        zeros=_regrouped(grid.zeros + shift if shift else grid.zeros, grid, scheme.group),
        scheme=scheme,
        bias=grid.bias,
        mins=None if grid.mins is None else _regrouped(_in(dtype, name, grid.mins), grid, scheme.group),
        order=grid.order,
    )


def _shift(own: QuantScheme, stored: QuantScheme) -> int:
    """A symmetric scheme's zero is implied: codes of fewer bits move up to stand around it."""
    return 2 ** (stored.bits - 1) - 2 ** (own.bits - 1) if stored.symmetric else 0


def _in(dtype: torch.dtype, name: str, mins: Tensor) -> Tensor:
    stored = mins.to(dtype)
    if not all_finite(stored):
        raise CheckpointError(f"{name}: a group's minimum is beyond {dtype}")
    return stored


def _regrouped(values: Tensor, grid: QuantGrid, group: int) -> Tensor:
    """Scales or zeros [G, N] repeated for groups of `group`, which divides the grid's own or spans K."""
    k, own = grid.k, grid.scheme.group
    if group == own or (own >= k and group >= k):
        return values
    repeat = -(-k // group) if own >= k else own // group
    return values.repeat_interleave(repeat, dim=0)[: -(-k // group)]


def _dense(name: str, linear: Linear, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`."""
    if isinstance(linear, DenseLinear) and linear.weight.dtype == dtype:
        return linear.weight
    weight = linear.dequantize().to(dtype)
    if not all_finite(weight):
        raise CheckpointError(f"{name}: dequantized weights exceed {dtype}; quantize a bf16 model instead")
    return weight
