"""Tensor parallel slices: what each of `tp` ranks holds of a store, as views of the stored tensors.

As Megatron-LM splits a decoder: w_qkv by heads and w_gate_up by neurons along N, w_o and w_down along K, the
output matrix by its vocabulary; everything else is whole on every rank. Results of w_o and w_down are summed
over the ranks, and rank 0 alone adds their bias. Nothing is packed again: tiles and groups go whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

from torch import Tensor

from turbomill.convert.store.layout import BITS, DENSE, GROUP, TILE
from turbomill.convert.store.reader import Store

SIZES = (2, 4, 8)
BLOCK = 16  # rows of w_gate_up: eight of gate, their eight of up


class Sized(Protocol):
    """A tensor that is stored, or planned."""

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def logical(self) -> tuple[int, ...]: ...
    @property
    def group(self) -> int | None: ...


@dataclass(frozen=True)
class Part:
    """What a rank has of a linear: ranges of its rows, in their order, or of its columns. None: all."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None


def part_of(model: dict[str, Any], linear: str, tp: int, rank: int) -> Part:
    """The part of a fused linear, by its name in the store, or of `output`, that `rank` of `tp` holds.

    With fewer KV heads than ranks, several ranks hold the same one. Sizes have passed `problems`.
    """
    kind, dim = linear.rpartition(".")[2], model["head_dim"]
    q, kv = model["num_heads"], model["num_kv_heads"]
    inner = _inner(model, linear)
    if kind == "w_qkv":
        each = max(kv // tp, 1)
        first = rank * each if kv >= tp else rank * kv // tp
        starts = (0, q * dim, (q + kv) * dim)
        mine = _even(q * dim, tp, rank)
        keys, values = (range(s + first * dim, s + (first + each) * dim) for s in starts[1:])
        return Part(rows=(mine, keys, values))
    if kind == "w_gate_up":
        return Part(rows=(_even(2 * inner, tp, rank),))
    if kind == "output":
        return Part(rows=(_even(model["vocab_size"], tp, rank),))
    if kind == "w_o":
        return Part(columns=_even(q * dim, tp, rank))
    if kind == "w_down":
        return Part(columns=_even(inner, tp, rank))
    return Part()


def problems(model: dict[str, Any], tensors: Iterable[Sized], tp: int) -> list[str]:
    """Why `tp` ranks cannot hold views of these tensors: a line for each kind of linear; empty: they can."""
    q, kv = model["num_heads"], model["num_kv_heads"]
    if q % tp:
        return [f"w_qkv: {q} query heads do not split in {tp}"]
    if kv % tp and tp % kv:
        return [f"w_qkv: {kv} KV heads do not split in {tp}, nor {tp} ranks among them"]
    found: dict[str, str] = {}
    for tensor in tensors:
        linear, _, what = tensor.name.rpartition(".")
        if tensor.layout not in (*BITS, DENSE) and what != "order":
            continue
        kind = linear.split(".", 2)[-1] if linear.startswith("layers.") else linear
        why = _misfit(model, linear, tensor, tp)
        if why:
            found.setdefault(kind, f"{kind}: {why}")
    return list(found.values())


def _misfit(model: dict[str, Any], linear: str, tensor: Sized, tp: int) -> str:
    part = part_of(model, linear, tp, tp - 1)
    if tensor.name.endswith(".order"):
        return "its rows are in an order of their own (desc_act)" if part.columns is not None else ""
    step = TILE if tensor.layout in BITS else 1
    if part.columns is not None:
        size = tensor.logical[-1]
        step = lcm(step, tensor.group or 1)
        if size % tp or size // tp % step:
            blocks = f" in blocks of {step} are {size / step:g} blocks" if step > 1 else ""
            return f"{size} columns{blocks}: they do not split in {tp}"
        return ""
    for rows in part.rows or ():
        step_here = lcm(step, BLOCK) if linear.endswith("w_gate_up") else step
        if linear != "output" and (len(rows) % step_here or rows.start % step_here):
            return f"rows {rows.start} to {rows.stop - 1} of a rank are not whole blocks of {step_here}"
    return ""


def fitting_sizes(model: dict[str, Any], tensors: Iterable[Sized]) -> list[int]:
    """The tp sizes that work, 1 among them."""
    tensors = list(tensors)
    return [1, *(tp for tp in SIZES if not problems(model, tensors, tp))]


def padded_multiple(model: dict[str, Any], tensors: Iterable[Sized], tp: int) -> int:
    """What MLPs' inner sizes must be multiples of so that they split in `tp`: whole tiles and groups."""
    inner = _inner(model, "w_down")
    groups = [
        t.group or 1 for t in tensors if t.layout in BITS and t.name.rpartition(".")[0].endswith("w_down")
    ]
    return tp * lcm(TILE, *(group for group in groups if group < inner))


def views(store: Store, tp: int, rank: int) -> dict[str, list[Tensor]]:
    """What `rank` of `tp` holds of each stored tensor: views, several where its rows lie apart, none of a
    bias that another rank adds. Raises ValueError for what `problems` names."""
    wrong = problems(store.model, store.tensors.values(), tp)
    if wrong:
        raise ValueError(f"tp {tp}: {'; '.join(wrong)}")
    found: dict[str, list[Tensor]] = {}
    for name, info in store.tensors.items():
        linear, _, kind = name.rpartition(".")
        part, whole = part_of(store.model, linear, tp, rank), store.tensor(name)
        if part.columns is not None:
            if kind == "bias":
                found[name] = [whole] if rank == 0 else []
            else:
                first = part.columns.start // _step(info.layout, info.group, columns=True)
                last = -(-part.columns.stop // _step(info.layout, info.group, columns=True))
                axis = 1 + (len(info.logical) == 3)
                found[name] = [whole.narrow(axis, first, last - first)]
        elif part.rows is not None and kind != "order":
            step = _step(info.layout, info.group, columns=False)
            axis = int(len(info.logical) == 3)
            found[name] = [
                whole.narrow(axis, rows.start // step, -(-rows.stop // step) - rows.start // step)
                for rows in part.rows
            ]
        else:
            found[name] = [whole]
    return found


def _step(layout: str, group: int | None, columns: bool) -> int:
    """Rows, or columns, of the weight to one index of a stored tensor."""
    if layout == GROUP:
        return (group or 1) if columns else TILE
    return TILE if layout in BITS else 1


def _even(size: int, tp: int, rank: int) -> range:
    return range(size * rank // tp, size * (rank + 1) // tp)


def _inner(model: dict[str, Any], linear: str) -> int:
    """The inner size of the MLP that a linear belongs to."""
    if ".experts." in f".{linear}":
        return model["expert_intermediate_size"]
    if ".shared." in f".{linear}":
        return model["shared_expert_intermediate_size"]
    return model["intermediate_size"]
