"""Writing what was quantized, in the names and the format of the checkpoint, and reading it back."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields
from pathlib import Path

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.runnable import RunnableCheckpoint
from turbomill.convert.writer import CheckpointWriter
from turbomill.quant.layer import LayerWork
from turbomill.quant.options import LayerRow


def names_by_layer(checkpoint: Checkpoint) -> tuple[list[str], list[list[str]]]:
    """The tensors that are no layer's, and those of each layer."""
    arch = checkpoint.arch
    before, after = arch.layer_prefix.split("{i}")
    others: list[str] = []
    layers: list[list[str]] = [[] for _ in range(arch.num_layers(checkpoint.config))]
    for name in checkpoint.names():
        number, separator, _ = name.removeprefix(before).partition(after)
        ours = name.startswith(before) and separator and number.isdigit() and int(number) < len(layers)
        (layers[int(number)] if ours else others).append(name)
    return others, layers


def write_layer(
    work: LayerWork,
    model: RunnableCheckpoint,
    writer: CheckpointWriter,
    form: WeightFormat,
    names: list[str],
) -> None:
    """Write one layer: linears packed, other tensors in their own dtype, as the module now has them.

    `names` are the layer's tensors as published.
    """
    checkpoint = model.published
    prefix = checkpoint.arch.layer(work.index)
    linears = set(checkpoint.arch.linears_of(checkpoint.config, work.index))
    state = work.module.state_dict()
    for name in names:
        short = name.removeprefix(prefix)
        linear, _, kind = short.rpartition(".")
        if linear in linears:
            if kind == "weight":
                _write_linear(work, model, writer, form, linear)
            continue
        here = model.here(name).removeprefix(prefix)
        if here in state:
            writer.add(name, state[here].to("cpu", checkpoint.dtype_of(name)))
        else:  # not a parameter of the layer (old checkpoints carry RoPE's frequencies): as it is
            writer.add(name, checkpoint.tensor(name))


def _write_linear(
    work: LayerWork, model: RunnableCheckpoint, writer: CheckpointWriter, form: WeightFormat, linear: str
) -> None:
    checkpoint = model.published
    prefix = checkpoint.arch.layer(work.index) + linear
    biased = checkpoint.has(f"{prefix}.bias")
    parts = []
    for part in model.parts_of(linear):
        bias = work.bias(part) if biased else None
        stored = None if bias is None else bias.to("cpu", checkpoint.dtype_of(f"{prefix}.bias"))
        parts.append(work.done[part].linear(stored))
    packed = model.join(linear, parts)
    packed.validate(prefix)  # type: ignore[union-attr]
    for key, tensor in form.pack(prefix, packed).items():
        writer.add(key, tensor)


def write_log(path: Path, rows: list[LayerRow]) -> None:
    """quant_log.csv: one row per linear."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(LayerRow)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
