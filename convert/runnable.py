"""A checkpoint under the names of the code that runs it: transformers' Llama for InternLM and Baichuan.

They publish q, k and v in one tensor, or a Llama's tensors under names of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.linear import DenseLinear, Linear
from turbomill.convert.models.base import Fusion, RunsAs
from turbomill.convert.models.hf import parsed
from turbomill.convert.store.fuse import fuse, reorder
from turbomill.convert.wrapped import WrappedCheckpoint
from turbomill.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def runnable(checkpoint: Checkpoint) -> RunnableCheckpoint:
    """The checkpoint under those names; most have them already."""
    return RunnableCheckpoint(checkpoint, checkpoint.arch.runs_as or RunsAs(checkpoint.arch))


class RunnableCheckpoint(WrappedCheckpoint):
    """What `published` holds, as the architecture `runs_as.arch` names it."""

    def __init__(self, published: Checkpoint, runs_as: RunsAs) -> None:
        super().__init__(published)
        self.published, self.runs_as = published, runs_as
        self.config = runs_as.config(published.config)
        self.arch = runs_as.arch  # type: ignore[misc]
        self.format = published.format  # type: ignore[misc]
        self._sizes = self.arch.linear_shapes(self.config)
        # name here -> published name, and the rows of it
        self._where: dict[str, tuple[str, slice | None]] = {}
        for name in published.names():
            self._where |= self._names_of(name)
        self._linears = {
            name.rpartition(".")[0]: (published.rpartition(".")[0], rows)
            for name, (published, rows) in self._where.items()
        }
        self._zeros: dict[str, tuple[int, ...]] = {}  # biases that only the other architecture has
        for index in range(self.arch.num_layers(self.config)):
            for linear in self.arch.linears_of(self.config, index):
                name = f"{self.arch.layer(index)}{linear}.bias"
                if self.arch.linear_biases(self.config)[linear] and name not in self._where:
                    self._zeros[name] = (self._sizes[linear][1],)

    def parts_of(self, linear: str) -> tuple[str, ...]:
        """The linears here that make up a published linear of a layer; names within a layer."""
        return self.runs_as.split.get(linear) or (self._renamed(f"x.{linear}.")[2:-1],)

    def here(self, published: str) -> str:
        """The name here of a published tensor that is not split."""
        return self._renamed(published)

    def join(self, linear: str, parts: list[Linear]) -> Linear:
        """A published linear, from its parts."""
        names = self.parts_of(linear)
        if len(names) == 1:
            return parts[0]
        whole, order = fuse(linear, Fusion(linear, names), parts), self._order(linear)
        return whole if order is None else reorder(whole, order.argsort())

    def _order(self, linear: str) -> Tensor | None:
        """For each row of the parts, its row in the published linear."""
        arch, config = self.published.arch, self.published.config
        fusion = next(found for found in arch.fusions if found.parts == (linear,))
        return fusion.order(config) if fusion.order else None

    def _renamed(self, name: str) -> str:
        for published, here in self.runs_as.rename:
            if name.startswith(published) or (published.startswith(".") and published in name):
                name = name.replace(published, here, 1)
        return name

    def _names_of(self, name: str) -> dict[str, tuple[str, slice | None]]:
        found: dict[str, tuple[str, slice | None]] = {}
        for linear, parts in self.runs_as.split.items():
            prefix, separator, kind = name.partition(f".{linear}.")
            if separator:
                start = 0
                for part in parts:
                    rows = self._sizes[part][1]
                    found[f"{prefix}.{part}.{kind}"] = (name, slice(start, start + rows))
                    start += rows
        return found or {self._renamed(name): (name, None)}

    def _find(self, name: str) -> tuple[str, slice | None]:
        if name not in self._where:
            raise CheckpointError(f"{self.path}: no tensor for {name} of {self.arch.name}")
        return self._where[name]

    def names(self) -> list[str]:
        """Every tensor's name here."""
        return [*self._where, *self._zeros]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name here."""
        return name in self._where or name in self._zeros

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape here."""
        if name in self._zeros:
            return self._zeros[name]
        published, rows = self._find(name)
        shape = self.published.shape(published)
        return shape if rows is None else (rows.stop - rows.start, *shape[1:])

    def dtype_of(self, name: str) -> torch.dtype:
        """As published."""
        return self.published.dtype if name in self._zeros else self.published.dtype_of(self._find(name)[0])

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """Of the published tensor."""
        return self.published.stored(self._find(name)[0])

    def tensor(self, name: str) -> Tensor:
        """The rows that are this tensor."""
        if name in self._zeros:
            return torch.zeros(self._zeros[name], dtype=self.dtype_of(name))
        published, rows = self._find(name)
        tensor = self.published.tensor(published)
        if name == self.arch.head and (change := self.published.arch.head_transform):
            tensor = change(tensor)
        if rows is None:
            return tensor
        order = self._order(self._linear_of(published))
        return (tensor if order is None else tensor[order])[rows]

    def linear(self, prefix: str) -> Linear:
        """A linear in canonical form, whatever the published one's format."""
        published, rows = self._linears[prefix]
        whole = self.published.linear(published)
        if rows is None:
            return self._with_zeros(prefix, whole)
        return _rows(reorder(whole, self._order(self._linear_of(f"{published}."))), rows)

    def packed(self, prefix: str) -> None:
        """Never: rows may lie elsewhere here."""

    def _with_zeros(self, prefix: str, linear: Linear) -> Linear:
        name = f"{prefix}.bias"
        return replace(linear, bias=self.tensor(name)) if name in self._zeros else linear

    def _linear_of(self, published: str) -> str:
        return next(linear for linear in self.runs_as.split if f".{linear}." in published)

    def hf_config(self) -> PretrainedConfig:
        """The other architecture's config."""
        own = self.arch.name == self.published.arch.name
        return self.published.hf_config() if own else parsed(self.config)


def _rows(linear: Linear, rows: slice) -> Linear:
    if isinstance(linear, DenseLinear):
        return DenseLinear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])
    return linear.columns(rows)
