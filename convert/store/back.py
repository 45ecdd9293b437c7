"""A store seen as the checkpoint it was made from: its tensors, taken apart, by their Hugging Face names.

Nothing is lost that the store holds: codes, scales and zeros are the stored ones, groups that conversion
repeated are joined again, and rows are back in the checkpoint's order. What conversion computed stays
computed: a normalised head is written normalised.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint, missing
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.hf import read_json
from turbomill.convert.linear import DenseLinear, Linear, QuantLinear, QuantScheme
from turbomill.convert.models.base import Architecture, Fusion, find_architecture
from turbomill.convert.source import STORE_FILE
from turbomill.convert.store.fuse import reorder, split
from turbomill.convert.store.reader import Store, StoredGrid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plain_names(arch: Architecture, config: dict[str, Any], tied: bool) -> dict[str, str]:
    """Hugging Face name -> name in the store, of every tensor that is no linear's, in forward order."""
    found = {arch.embedding: "tok_embeddings.weight"}
    for index in range(arch.num_layers(config)):
        prefix, here = arch.layer(index), f"layers.{index}."
        norms = {**arch.norms, **arch.head_norms}
        found |= {f"{prefix}{source}.weight": f"{here}{name}.weight" for source, name in norms.items()}
        matrices = arch.matrices(config, index)
        found |= {
            f"{prefix}{source}.weight": f"{here}{name}.weight" for source, (name, _) in matrices.items()
        }
    found[arch.final_norm] = "norm.weight"
    return found if tied else {**found, arch.head: "output.weight"}


def norm_names(arch: Architecture, config: dict[str, Any]) -> set[str]:
    """Hugging Face names of the tensors that `Architecture.norm_offset` is added to."""
    inner = [f"{norm}.weight" for norm in (*arch.norms, *arch.head_norms)]
    layers = range(arch.num_layers(config))
    return {arch.final_norm, *(arch.layer(index) + norm for index in layers for norm in inner)}


class StoreCheckpoint(Checkpoint):
    """`store` as a checkpoint. A dense linear is `X.weight`; a quantized one is had by `linear` alone. An
    embedding or output matrix with codes is had by `linear` exactly, and by its name in the model's dtype."""

    def __init__(self, store: Store) -> None:
        self.store, self.path = store, store.path
        self.config = {"architectures": [store.manifest["architecture"]], **store.manifest["hf_config"]}
        arch = find_architecture(self.config)
        self._plain = plain_names(arch, self.config, arch.tied(self.config))
        self._norms = norm_names(arch, self.config) if arch.norm_offset else set()
        self._fusions: dict[str, tuple[str, Fusion, int]] = {}  # linear -> fused linear, its fusion, expert
        for index in range(arch.num_layers(self.config)):
            for fusion in arch.fusions_of(self.config, index):
                for expert in range(arch.num_experts(self.config) if fusion.of_experts else 1):
                    for name in fusion.names(expert):
                        where = (f"layers.{index}.{fusion.name}", fusion, expert)
                        self._fusions[arch.layer(index) + name] = where
        self._last: tuple[tuple[str, int], list[Linear]] | None = None  # the fused linear taken apart last
        self._sizes = arch.linear_shapes(self.config)
        self._biases = arch.linear_biases(self.config)

    @property
    def scheme(self) -> QuantScheme | None:
        """The store's."""
        return self.store.scheme

    def names(self) -> list[str]:
        """Plain tensors, then dense linears; a quantized linear has no tensors of its own here."""
        dense = [prefix for prefix in self._fusions if self._is_dense(prefix)]
        biases = [prefix for prefix in self._fusions if self._has_bias(prefix)]
        return [*self._plain, *(f"{name}.weight" for name in dense), *(f"{name}.bias" for name in biases)]

    def has(self, name: str) -> bool:
        """Whether `tensor` gives it."""
        prefix, _, kind = name.rpartition(".")
        if name in self._plain:
            return True
        return (kind == "weight" and self._is_dense(prefix)) or (kind == "bias" and self._has_bias(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """From the manifest; of a linear's, from the sizes of the model."""
        if name in self._plain:
            table = self._table(name)
            return self.store.tensors[f"{table}.qweight" if table else self._plain[name]].logical
        k, n = self._sizes[self._short(name)]
        return (n,) if name.endswith(".bias") else (n, k)

    def dtype_of(self, name: str) -> torch.dtype:
        """From the manifest; a norm with an offset has the model's where that loses nothing."""
        if name in self._norms:
            return self.tensor(name).dtype
        if self._table(name):
            return getattr(torch, self.store.manifest["dtype"])
        prefix, _, kind = name.rpartition(".")
        where = self._plain[name] if name in self._plain else f"{self._fusions[prefix][0]}.{kind}"
        return getattr(torch, self.store.tensors[where].dtype)

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """Shape, dtype, layout and bytes of the tensor as it would be written."""
        shape, dtype = self.shape(name), self.dtype_of(name)
        return shape, str(dtype).removeprefix("torch."), "row-major", prod(shape) * dtype.itemsize

    def tensor(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError for what is not there, a quantized linear's among it."""
        if name in self._norms:
            return self._without_offset(self.store.tensor(self._plain[name]))
        if table := self._table(name):
            return self.store.linear(table).dequantize().to(self.dtype_of(name))
        if name in self._plain:
            return self.store.tensor(self._plain[name])
        prefix, _, kind = name.rpartition(".")
        if not self.has(name):
            raise missing(self.path, name, self.names())
        linear = self.linear(prefix)
        found = linear.bias if kind == "bias" else linear.weight if isinstance(linear, DenseLinear) else None
        assert found is not None
        return found

    def exact(self, name: str) -> Tensor:
        """What its codes stand for, where it has any."""
        table = self._table(name)
        return self.store.linear(table).dequantize() if table else super().exact(name)

    def format_of(self, prefix: str) -> WeightFormat:
        """Dense: of a quantized linear there are no tensors to be in a format."""
        return DenseFormat()

    def linear(self, prefix: str) -> Linear:
        """A linear as the checkpoint had it: its rows of the fused one, in its own order and group."""
        if table := self._table(f"{prefix}.weight"):
            return self.store.linear(table)
        if prefix not in self._fusions:
            raise missing(self.path, prefix, self._fusions)
        name, fusion, expert = self._fusions[prefix]
        if self._last is None or self._last[0] != (name, expert):
            self._last = ((name, expert), self._apart(name, fusion, expert))
        part = self._last[1][fusion.names(expert).index(self._short(prefix, whole=True))]
        return part if part.bias is None or self._has_bias(prefix) else replace(part, bias=None)

    def scheme_of(self, prefix: str, k: int) -> QuantScheme | None:
        """The scheme that `linear` has."""
        name, fusion, expert = self._fusions[prefix]
        grid = self.store.grid(name, expert if fusion.of_experts else None)
        return None if grid is None else replace(grid.scheme, group=self._group(grid, k))

    def _apart(self, name: str, fusion: Fusion, expert: int) -> list[Linear]:
        whole = self.store.linear(name, expert if fusion.of_experts else None)
        if fusion.order is not None:
            whole = reorder(whole, fusion.order(self.config).argsort())
        sizes = [self._sizes[part][1] for part in fusion.names(expert)]
        block = fusion.interleave
        none: list[None] = [None] * len(sizes)
        biases = none if whole.bias is None else split(whole.bias, 0, block, sizes)
        if isinstance(whole, DenseLinear):
            weights = split(whole.weight, 0, block, sizes)
            return [DenseLinear(*part) for part in zip(weights, biases, strict=True)]
        scheme = replace(whole.scheme, group=self._group(whole, whole.shape[0]))
        step = _repeats(whole.scheme.group, scheme.group)
        values = (whole.codes, whole.scales[::step], whole.zeros[::step])
        mins = none if whole.mins is None else split(whole.mins[::step], 1, block, sizes)
        parts = zip(*(split(value, 1, block, sizes) for value in values), biases, mins, strict=True)
        return [
            QuantLinear(codes, scales, zeros, scheme, bias, low, whole.order)
            for codes, scales, zeros, bias, low in parts
        ]

    def _group(self, grid: StoredGrid | QuantLinear, k: int) -> int:
        """The model's own group where the stored ones repeat it, a group that spans K, or the stored one."""
        stored, model = grid.scheme.group, self.scheme
        group = k if model is None or model.group <= 0 else min(model.group, k)
        if model is not None and group >= stored and (group == k or group % stored == 0):
            step = _repeats(stored, group)
            values = [value for value in (grid.scales, grid.zeros, grid.mins) if value is not None]
            if all(torch.equal(v[::step].repeat_interleave(step, 0)[: len(v)], v) for v in values):
                return group
        return min(stored, k)

    def _without_offset(self, stored: Tensor) -> Tensor:
        """In the model's dtype where adding the offset gives the stored bits again, else in fp32."""
        offset = self.arch.norm_offset
        exact = stored - offset
        narrow = exact.to(getattr(torch, self.store.manifest["dtype"]))
        return narrow if torch.equal(narrow.float() + offset, stored) else exact

    def _table(self, name: str) -> str:
        """The stored name, without its end, of an embedding or output matrix that has codes; or empty."""
        base = self._plain.get(name, "").removesuffix(".weight")
        return base if f"{base}.qweight" in self.store.tensors else ""

    def _is_dense(self, prefix: str) -> bool:
        return prefix in self._fusions and f"{self._fusions[prefix][0]}.weight" in self.store.tensors

    def _has_bias(self, prefix: str) -> bool:
        """A fused linear has a bias for all of its parts; the checkpoint had it for those that need one."""
        return (
            prefix in self._fusions
            and f"{self._fusions[prefix][0]}.bias" in self.store.tensors
            and self._biases[self._short(prefix, whole=True)]
        )

    def _short(self, name: str, whole: bool = False) -> str:
        """The name within a layer of a tensor's linear, or of a linear itself (`whole`)."""
        prefix = name if whole else name.rpartition(".")[0]
        before, after = self.arch.layer_prefix.split("{i}")
        return prefix.removeprefix(before).partition(after)[2]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The store's."""
        return self.store.tokenizer()

    @property
    def has_tokenizer(self) -> bool:
        """As its manifest says."""
        return bool(self.store.manifest["tokenizer"]["files"])

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json of the store, or the ids that its manifest has."""
        file = self.path / "generation_config.json"
        if file.is_file():
            return read_json(file)
        return {"bos_token_id": self.store.bos_token_id, "eos_token_id": self.store.eos_token_ids}

    def copy_sidecars(self, dst: Path) -> None:
        """Every file of the store that is neither weights nor the manifest."""
        weights = {file.name for file in self.weight_files()}
        for name in self.store.manifest["files"]:
            if name not in weights and name != STORE_FILE:
                (dst / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, dst / name)

    def weight_files(self) -> list[Path]:
        """The shards."""
        return [self.path / name for name in self.store.manifest["files"] if name.endswith(".safetensors")]


def _repeats(stored: int, group: int) -> int:
    """How many stored groups make one of `group` rows; where one stored group spans K, that one."""
    return -(-group // stored)
