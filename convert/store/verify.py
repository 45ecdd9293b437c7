"""Whether a store is whole, and holds what the checkpoint it was made from holds: the way back, in bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.linear import DenseLinear, Linear, QuantLinear, storable_scales
from turbomill.convert.models.base import Fusion
from turbomill.convert.store.fuse import join
from turbomill.convert.store.reader import Store

MOST_NAMES = 5


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    detail: str


def check_files(store: Store) -> Check:
    """Every file against its checksum; reads all of them."""
    wrong = store.verify()
    if wrong:
        return Check("checksums", False, f"not the bytes that were written: {_some(list(wrong))}")
    return Check("checksums", True, f"{len(store.manifest['checksums'])} files agree")


def check_chat_template(store: Store) -> Check:
    """That the tokenizer loads and its template renders; the rendering is the detail."""
    if not store.manifest["tokenizer"]["files"]:
        return Check("chat template", True, "no tokenizer: the store runs on token ids only")
    try:
        tokenizer = store.tokenizer()
        if not tokenizer.chat_template:
            return Check("chat template", True, "none: completions only")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # tokenizer files and templates are programs: anything can go wrong in one
        return Check("chat template", False, f"does not render: {str(error).partition(chr(10))[0]}")
    return Check("chat template", True, str(text))


def check_tensors_against(store: Store, checkpoint: Checkpoint) -> Check:
    """Every tensor unpacked and compared bit by bit with the checkpoint's.

    Two things are not bits: fp32 scales, which the store narrows to fp16, and what the store keeps dense of a
    quantized checkpoint, which is rounded to the store's dtype. They are compared after the same rounding.
    """
    arch = checkpoint.arch
    if store.manifest["architecture"] != arch.name:
        other = store.manifest["architecture"]
        return Check("tensors", False, f"the store is a {other}, {checkpoint.path} a {arch.name}")
    if store.model != arch.model_config(checkpoint.config):
        return Check("tensors", False, f"the store's sizes are not those of {checkpoint.path}")
    layers = arch.num_layers(checkpoint.config)
    differing, seen = [], 0
    with console.progress("comparing layers", layers + 1) as task:
        for index in range(-1, layers):
            pairs = _other_pairs(store, checkpoint) if index < 0 else _layer_pairs(store, checkpoint, index)
            for name, ours, theirs in pairs:
                seen += 1
                if not torch.equal(ours, theirs):
                    differing.append(name)
            task.advance()
    if differing:
        return Check(
            "tensors", False, f"{len(differing)} of {seen} differ from {checkpoint.path}: {_some(differing)}"
        )
    return Check("tensors", True, f"{seen} equal {checkpoint.path} bit by bit")


Pairs = Iterator[tuple[str, Tensor, Tensor]]  # a name, the store's values and the checkpoint's


def _other_pairs(store: Store, checkpoint: Checkpoint) -> Pairs:
    """What belongs to no layer."""
    arch, config = checkpoint.arch, checkpoint.config
    yield "tok_embeddings", store.tensor("tok_embeddings.weight"), checkpoint.tensor(arch.embedding)
    yield "norm", store.tensor("norm.weight"), _norm(checkpoint, arch.final_norm)
    for name, table in {"rope": arch.rope_inv_freq(config), **arch.rope_tables(config)}.items():
        yield name, store.tensor(f"{name}.inv_freq"), table
    if not checkpoint.tied:
        head = checkpoint.tensor(arch.head)
        change = arch.head_transform
        yield "output", store.tensor("output.weight"), head if change is None else change(head)


def _layer_pairs(store: Store, checkpoint: Checkpoint, index: int) -> Pairs:
    """Layer `index`: norms, dense matrices, and each fused linear, expert by expert."""
    arch, config = checkpoint.arch, checkpoint.config
    prefix = arch.layer(index)
    for source, name in {**arch.norms, **arch.head_norms}.items():
        full = f"layers.{index}.{name}"
        yield full, store.tensor(f"{full}.weight"), _norm(checkpoint, f"{prefix}{source}.weight")
    for source, (name, _) in arch.matrices(config, index).items():
        full = f"layers.{index}.{name}"
        yield full, store.tensor(f"{full}.weight"), checkpoint.tensor(f"{prefix}{source}.weight")
    for fusion in arch.fusions_of(config, index):
        name = f"layers.{index}.{fusion.name}"
        for expert in range(arch.num_experts(config)) if fusion.of_experts else [None]:
            ours = store.linear(name, expert)
            parts = [checkpoint.linear(prefix + part) for part in fusion.names(expert or 0)]
            full = name if expert is None else f"{name} of expert {expert}"
            yield full, ours.dequantize(), _weights(checkpoint, fusion, parts, ours)
            if ours.bias is not None:
                yield f"{full}.bias", ours.bias.float(), _bias(checkpoint, fusion, parts)


def _norm(checkpoint: Checkpoint, name: str) -> Tensor:
    weight, offset = checkpoint.tensor(name), checkpoint.arch.norm_offset
    return weight.float() + offset if offset else weight


def _weights(checkpoint: Checkpoint, fusion: Fusion, parts: list[Linear], stored: Linear) -> Tensor:
    """The checkpoint's weight of a fused linear, fp32 [N, K]."""
    values = []
    for part in parts:
        if isinstance(part, QuantLinear) and isinstance(stored, QuantLinear):
            narrow = storable_scales(fusion.name, part.scales).to(stored.scales.dtype)
            part = replace(part, scales=narrow)
        value = part.dequantize()
        values.append(value.to(stored.weight.dtype).float() if isinstance(stored, DenseLinear) else value)
    return _in_order(checkpoint, fusion, join(values, 0, fusion.interleave))


def _bias(checkpoint: Checkpoint, fusion: Fusion, parts: list[Linear]) -> Tensor:
    """fp32 [N]; zeros where only another part has one."""
    values = [torch.zeros(part.shape[1]) if part.bias is None else part.bias.float() for part in parts]
    return _in_order(checkpoint, fusion, join(values, 0, fusion.interleave))


def _in_order(checkpoint: Checkpoint, fusion: Fusion, values: Tensor) -> Tensor:
    return values if fusion.order is None else values[fusion.order(checkpoint.config)]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
