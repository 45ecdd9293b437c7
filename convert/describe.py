"""What `inspect` shows: a checkpoint's or a store's architecture, sizes, scheme, tensors and origin."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.tree import Tree

from turbomill.convert.base import Checkpoint
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.linear import QuantScheme
from turbomill.convert.source import kind_of
from turbomill.convert.store import Store, open_store
from turbomill.convert.store.slices import fitting_sizes
from turbomill.errors import CheckpointError, TurbomillError


@dataclass(frozen=True)
class TensorLine:
    """One tensor: its layout (or `stored`), dtype, stored and logical shape, bytes."""

    name: str
    layout: str
    dtype: str
    shape: list[int]
    logical: list[int]
    nbytes: int


@dataclass(frozen=True)
class Description:
    """Everything `inspect` knows. `bits_per_weight` counts all bytes against the model's parameters."""

    kind: str  # hf, gguf, store
    path: str
    architecture: str
    model: dict[str, Any]
    dtype: str
    scheme: dict[str, Any] | None
    context_length: int
    parameters: int
    bytes: int
    bits_per_weight: float
    chat_template: bool | None  # None: no tokenizer
    fingerprint: str
    tensors: list[TensorLine]
    note: str = ""  # what becomes of the weights when they are read
    source: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    verified: bool | None = None  # None: not asked for
    tp: list[int] | None = None  # numbers of ranks that a store splits over

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def render(self, tensors: bool = True) -> RenderableType:
        """For a terminal."""
        tree = Tree(f"[bold]{self.path}[/bold]  {self.kind}, {self.architecture}")
        sizes = tree.add("sizes")
        for name, value in self.model.items():
            sizes.add(f"{name}: {value}")
        tree.add(f"context: {self.context_length} tokens")
        weights = tree.add(f"weights: {self.parameters:,} parameters, {self.bytes:,} bytes")
        weights.add(f"{self.bits_per_weight:.2f} bits per weight, {self.dtype}")
        weights.add(f"scheme: {_scheme_text(self.scheme)}")
        if self.note:
            weights.add(self.note)
        types = Counter(line.dtype for line in self.tensors)
        weights.add("tensors: " + ", ".join(f"{count} {kind}" for kind, count in types.most_common()))
        if self.tp is not None:
            tree.add(f"tensor parallel ranks: {', '.join(map(str, self.tp))}")
        template = {True: "present", False: "absent", None: "no tokenizer"}[self.chat_template]
        tree.add(f"chat template: {template}")
        tree.add(f"fingerprint: {self.fingerprint}")
        if self.verified is not None:
            tree.add("checksums: all agree" if self.verified else "checksums: WRONG")
        if self.source:
            tree.add(f"made from {self.source.get('path')} ({str(self.source.get('fingerprint'))[:16]})")
        if self.provenance:
            tree.add(f"made by `{self.provenance.get('command')}` at {self.provenance.get('time')}")
        return Group(tree, self._table()) if tensors else tree

    def _table(self) -> Table:
        table = Table(box=None, header_style="bold")
        for title in ("tensor", "layout", "dtype", "stored shape"):
            table.add_column(title, overflow="fold")
        table.add_column("bytes", justify="right")
        for line in self.tensors:
            table.add_row(line.name, line.layout, line.dtype, str(line.shape), f"{line.nbytes:,}")
        return table


def _scheme_text(scheme: dict[str, Any] | None) -> str:
    if scheme is None:
        return "dense"
    known = (scheme["bits"], scheme["group"], scheme["symmetric"], scheme.get("mins", False))
    text = str(QuantScheme(*known))
    return f"{scheme['format']} {text}"


def describe(path: Path, verify: bool = False) -> Description:
    """Describe a checkpoint, GGUF file or store. Raises CheckpointError, also when `verify` finds damage."""
    if kind_of(path) == "store":
        return describe_store(open_store(path), verify)
    return _describe_checkpoint(open_checkpoint(path))


def describe_store(store: Store, verify: bool = False) -> Description:
    """Describe an open store; `verify` reads all of it."""
    damaged = store.verify() if verify else []
    if damaged:
        raise CheckpointError(f"{store.path / damaged[0]}: checksum differs; convert the checkpoint again")
    lines = [
        TensorLine(t.name, t.layout, t.dtype, list(t.shape), list(t.logical), t.nbytes)
        for t in store.tensors.values()
    ]
    # Scales and zeros are not parameters; their linear's codes are.
    counted = [t for t in lines if t.layout != "group.n64" and not t.name.startswith("rope")]
    counted = [t for t in counted if not t.name.endswith(".order")]
    parameters = sum(prod(t.logical) for t in counted)
    manifest = store.manifest
    tokenizer = manifest["tokenizer"]
    return Description(
        kind="store",
        path=str(store.path),
        architecture=manifest["architecture"],
        model=store.model,
        dtype=manifest["dtype"],
        scheme=manifest["scheme"],
        context_length=store.context_length,
        parameters=parameters,
        bytes=store.disk_bytes,
        bits_per_weight=8 * store.disk_bytes / parameters,
        chat_template=tokenizer["chat_template"] if tokenizer["files"] else None,
        fingerprint=store.fingerprint,
        tensors=lines,
        note=manifest["source"].get("note", ""),
        source=manifest["source"],
        provenance=manifest["provenance"],
        verified=True if verify else None,
        tp=fitting_sizes(store.model, store.tensors.values()),
    )


def _describe_checkpoint(checkpoint: Checkpoint) -> Description:
    arch, config = checkpoint.arch, checkpoint.config
    lines = []
    for name in checkpoint.names():
        shape, dtype, layout, nbytes = checkpoint.stored(name)
        lines.append(TensorLine(name, layout, dtype, list(shape), list(checkpoint.shape(name)), nbytes))
    shapes = arch.linear_shapes(config)
    layers = range(arch.num_layers(config))
    linears = sum(prod(shapes[name]) for index in layers for name in arch.linears_of(config, index))
    others = sum(prod(checkpoint.shape(n)) for n in arch.other_weights(config) if checkpoint.has(n))
    biases = sum(prod(line.logical) for line in lines if line.name.endswith(".bias"))
    parameters = linears + others + biases
    size = sum(line.nbytes for line in lines)
    scheme = checkpoint.scheme
    return Description(
        kind=kind_of(checkpoint.path),
        path=str(checkpoint.path),
        architecture=arch.name,
        model=arch.model_config(config),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        scheme=scheme and {"format": checkpoint.format.name, **asdict(scheme)},
        context_length=int(config.get("max_position_embeddings", 2048)),
        parameters=parameters,
        bytes=size,
        bits_per_weight=8 * size / parameters,
        chat_template=_has_template(checkpoint),
        fingerprint=checkpoint.fingerprint,
        tensors=lines,
        note=checkpoint.note,
    )


def _has_template(checkpoint: Checkpoint) -> bool | None:
    try:
        return bool(checkpoint.tokenizer().chat_template)
    except TurbomillError:
        return None
