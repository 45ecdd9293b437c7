"""Whether a store is whole, and holds what the checkpoint it was made from holds: the way back, in bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.linear import DenseLinear, Linear, QuantLinear, storable_scales
from turbomill.convert.padded import PaddedCheckpoint
from turbomill.convert.store.back import StoreCheckpoint, norm_names, plain_names
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
    """Every tensor taken out of the store again and compared bit by bit with the checkpoint's.

    Two things are not bits: fp32 scales, which the store narrows to fp16, and what the store keeps dense of a
    quantized checkpoint, which is rounded to the store's dtype. They are compared after the same rounding.
    """
    padded = store.manifest.get("source", {}).get("padded")
    if padded:
        checkpoint = PaddedCheckpoint(checkpoint, padded)
    arch = checkpoint.arch
    if store.manifest["architecture"] != arch.name:
        other = store.manifest["architecture"]
        return Check("tensors", False, f"the store is a {other}, {checkpoint.path} a {arch.name}")
    if store.model != arch.model_config(checkpoint.config):
        return Check("tensors", False, f"the store's sizes are not those of {checkpoint.path}")
    differing, seen = [], 0
    back = StoreCheckpoint(store)
    linears = arch.linear_prefixes(checkpoint.config)
    with console.progress("comparing linears", len(linears)) as task:
        for name, ours, theirs in _other_pairs(back, checkpoint):
            seen += 1
            if not torch.equal(ours, theirs):
                differing.append(name)
        for prefix in linears:
            for name, ours, theirs in _linear_pairs(prefix, back.linear(prefix), checkpoint.linear(prefix)):
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


def _other_pairs(back: StoreCheckpoint, checkpoint: Checkpoint) -> Pairs:
    """What belongs to no linear, as the store holds it: norms with their offset, the head as it is used."""
    arch, config, store = checkpoint.arch, checkpoint.config, back.store
    for name, table in {"rope": arch.rope_inv_freq(config), **arch.rope_tables(config)}.items():
        yield name, store.tensor(f"{name}.inv_freq"), table
    norms = norm_names(arch, config) if arch.norm_offset else set()
    for name, stored in plain_names(arch, config, checkpoint.tied).items():
        prefix, table = name.removesuffix(".weight"), stored.removesuffix(".weight")
        if f"{table}.qweight" in store.tensors:
            yield from _linear_pairs(prefix, store.linear(table), checkpoint.linear(prefix))
            continue
        theirs = checkpoint.tensor(name)
        if name in norms:
            theirs = theirs.float() + arch.norm_offset
        elif name == arch.head and arch.head_transform:
            theirs = arch.head_transform(theirs)
        yield name, store.tensor(stored), theirs


def _linear_pairs(prefix: str, ours: Linear, theirs: Linear) -> Pairs:
    if isinstance(ours, QuantLinear) and isinstance(theirs, QuantLinear):
        theirs = replace(theirs, scales=storable_scales(prefix, theirs.scales).to(ours.scales.dtype))
    value = theirs.dequantize()
    if isinstance(ours, DenseLinear):
        value = value.to(ours.weight.dtype).float()
    yield prefix, ours.dequantize(), value
    if ours.bias is not None:
        none = torch.zeros(ours.shape[1])
        yield f"{prefix}.bias", ours.bias.float(), none if theirs.bias is None else theirs.bias.float()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
