"""`turbomill diff`: what two models hold that is not the same, whatever each is stored as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.checkpoint import Checkpoint, open_checkpoint
from turbomill.convert.linear import Linear, QuantLinear
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.store import Store, open_store
from turbomill.convert.store.fuse import join
from turbomill.errors import CheckpointError


@dataclass(frozen=True)
class TensorDifference:
    """One tensor, by its name in a store. `relative` is |A - B|^2 / |A|^2; None where shapes differ."""

    name: str
    a: str  # scheme, or dtype
    b: str
    largest: float | None  # |A - B|
    relative: float | None


@dataclass(frozen=True)
class ModelDifference:
    """Everything that differs: sizes by name, then tensors; `equal` counts those that do not."""

    sizes: dict[str, tuple[Any, Any]]
    tensors: list[TensorDifference]
    equal: int

    @property
    def same(self) -> bool:
        """Whether both compute the same."""
        return not self.sizes and not self.tensors


def diff(a: str | Path, b: str | Path) -> ModelDifference:
    """Compare checkpoints or stores, in any pair. Weights are compared as what they stand for, in fp32.

    Raises CheckpointError for what is neither, and for two architectures that have nothing to compare.
    """
    one, other = _open(a), _open(b)
    if one.architecture != other.architecture:
        raise CheckpointError(f"{a} is a {one.architecture}, {b} a {other.architecture}: nothing to compare")
    keys = sorted(set(one.sizes) | set(other.sizes))
    sizes = {
        key: (one.sizes.get(key), other.sizes.get(key))
        for key in keys
        if one.sizes.get(key) != other.sizes.get(key)
    }
    tensors, equal = [], 0
    shared = [name for name in one.tensors if name in other.tensors]
    missing = [name for name in {**one.tensors, **other.tensors} if name not in shared]
    with console.progress("comparing", len(shared)) as task:
        for name in shared:
            found = _compare(name, one.tensors[name](), other.tensors[name]())
            tensors += [found] if found else []
            equal += found is None
            task.advance()
    for name in missing:
        where = ("present", "absent") if name in one.tensors else ("absent", "present")
        tensors.append(TensorDifference(name, where[0], where[1], None, None))
    return ModelDifference(sizes, tensors, equal)


Value = tuple[str, Tensor]  # how it is stored, and what it stands for


@dataclass(frozen=True)
class _Model:
    architecture: str
    sizes: dict[str, Any]
    tensors: dict[str, Callable[[], Value]]


def _compare(name: str, a: Value, b: Value) -> TensorDifference | None:
    if a[1].shape != b[1].shape:
        shapes = [f"{kind} {list(value.shape)}" for kind, value in (a, b)]
        return TensorDifference(name, shapes[0], shapes[1], None, None)
    if torch.equal(a[1], b[1]):
        return None
    delta = a[1] - b[1]
    energy = float(a[1].double().square().sum())
    relative = float(delta.double().square().sum()) / energy if energy else float("inf")
    return TensorDifference(name, a[0], b[0], float(delta.abs().max()), relative)


def _open(model: str | Path) -> _Model:
    path = resolve_model(model)
    if kind_of(path) == "store":
        store = open_store(path)
        return _Model(store.manifest["architecture"], store.model, dict(_of_store(store)))
    checkpoint = open_checkpoint(path)
    arch = checkpoint.arch
    return _Model(arch.name, arch.model_config(checkpoint.config), dict(_of_checkpoint(checkpoint)))


Named = Iterator[tuple[str, Callable[[], Value]]]


def _of_store(store: Store) -> Named:
    """A store's tensors; a fused linear is one, or one for each expert."""
    for name, info in store.tensors.items():
        base, _, kind = name.rpartition(".")
        if kind in ("scales", "zeros", "mins", "order", "inv_freq"):
            continue
        experts = info.logical[0] if len(info.logical) == 3 else 0
        if kind == "bias":
            yield name, lambda name=name: _plain(store.tensor(name))
        elif kind == "qweight" or experts:
            for expert in range(experts) if experts else [None]:
                full = base if expert is None else f"{base}.{expert}"
                yield full, lambda base=base, expert=expert: _value(store.linear(base, expert))
        else:
            yield base, lambda name=name: _plain(store.tensor(name))


def _of_checkpoint(checkpoint: Checkpoint) -> Named:
    """A checkpoint's, by the names that a store of it would have."""
    arch, config = checkpoint.arch, checkpoint.config

    def plain(name: str, offset: float = 0.0) -> Callable[[], Value]:
        return lambda: _plain(checkpoint.tensor(name), offset)

    yield "tok_embeddings", plain(arch.embedding)
    yield "norm", plain(arch.final_norm, arch.norm_offset)
    if not checkpoint.tied:
        change = arch.head_transform
        yield (
            "output",
            plain(arch.head) if change is None else lambda: _plain(change(checkpoint.tensor(arch.head))),
        )
    for index in range(arch.num_layers(config)):
        prefix, here = arch.layer(index), f"layers.{index}."
        for source, name in {**arch.norms, **arch.head_norms}.items():
            yield here + name, plain(f"{prefix}{source}.weight", arch.norm_offset)
        for source, (name, _) in arch.matrices(config, index).items():
            yield here + name, plain(f"{prefix}{source}.weight")
        for fusion in arch.fusions_of(config, index):
            order = fusion.order(config) if fusion.order else None
            for expert in range(arch.num_experts(config)) if fusion.of_experts else [None]:
                names = [prefix + part for part in fusion.names(expert or 0)]
                full = here + fusion.name if expert is None else f"{here}{fusion.name}.{expert}"

                def fused(names=names, block=fusion.interleave, order=order) -> Value:
                    parts = [_value(checkpoint.linear(name)) for name in names]
                    whole = join([part for _, part in parts], 0, block)
                    return " + ".join(dict(parts)), whole if order is None else whole[order]

                yield full, fused
                if any(checkpoint.has(f"{name}.bias") for name in names):

                    def bias(names=names, block=fusion.interleave, order=order) -> Value:
                        found = [checkpoint.linear(name) for name in names]
                        values = [
                            torch.zeros(part.shape[1]) if part.bias is None else part.bias.float()
                            for part in found
                        ]
                        whole = join(values, 0, block)
                        return "float32", whole if order is None else whole[order]

                    yield f"{full}.bias", bias


def _plain(tensor: Tensor, offset: float = 0.0) -> Value:
    return str(tensor.dtype).removeprefix("torch."), tensor.float() + offset if offset else tensor.float()


def _value(linear: Linear) -> Value:
    if isinstance(linear, QuantLinear):
        return str(linear.scheme), linear.dequantize()
    return str(linear.weight.dtype).removeprefix("torch."), linear.weight.float()
