"""`turbomill diff`: what two models hold that is not the same, whatever each is stored as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.base import Checkpoint
from turbomill.convert.linear import QuantLinear
from turbomill.convert.rewrite import open_any
from turbomill.convert.store.back import StoreCheckpoint, norm_names
from turbomill.errors import CheckpointError


@dataclass(frozen=True)
class TensorDifference:
    """One tensor, by its name in a checkpoint. `relative` is |A - B|^2 / |A|^2; None where shapes differ."""

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
    one, other = open_any(a), open_any(b)
    if one.arch.name != other.arch.name:
        raise CheckpointError(f"{a} is a {one.arch.name}, {b} a {other.arch.name}: nothing to compare")
    sizes = [model.arch.model_config(model.config) for model in (one, other)]
    different = {
        key: (sizes[0].get(key), sizes[1].get(key))
        for key in sorted(sizes[0].keys() | sizes[1].keys())
        if sizes[0].get(key) != sizes[1].get(key)
    }
    tensors, equal = [], 0
    names = [_names(model) for model in (one, other)]
    shared = [name for name in names[0] if name in names[1]]
    with console.progress("comparing", len(shared)) as task:
        for name in shared:
            found = _compare(name, _value(one, name), _value(other, name))
            tensors += [found] if found else []
            equal += found is None
            task.advance()
    for name in names[0] | names[1]:
        if name not in shared:
            where = ("present", "absent") if name in names[0] else ("absent", "present")
            tensors.append(TensorDifference(name, where[0], where[1], None, None))
    return ModelDifference(different, tensors, equal)


Value = tuple[str, Tensor]  # how it is stored, and what it stands for


def _names(model: Checkpoint) -> dict[str, None]:
    """What a model computes with: weights of every kind by name, linears' with `.weight` however stored."""
    arch, config = model.arch, model.config
    prefixes = arch.linear_prefixes(config)
    biases = [f"{prefix}.bias" for prefix in prefixes if model.has(f"{prefix}.bias")]
    return dict.fromkeys([*arch.other_weights(config), *(f"{prefix}.weight" for prefix in prefixes), *biases])


def _value(model: Checkpoint, name: str) -> Value:
    prefix, _, what = name.rpartition(".")
    if what == "weight" and name not in model.arch.other_weights(model.config):
        linear = model.linear(prefix)
        if isinstance(linear, QuantLinear):
            return str(linear.scheme), linear.dequantize()
    tensor, arch = model.tensor(name), model.arch
    kind, value = str(tensor.dtype).removeprefix("torch."), tensor.float()
    if arch.norm_offset and name in norm_names(arch, model.config):
        return kind, value + arch.norm_offset
    if name == arch.head and arch.head_transform and not isinstance(model, StoreCheckpoint):
        return kind, arch.head_transform(tensor).float()  # a store has it done
    return kind, value


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
