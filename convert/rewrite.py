"""A checkpoint, or a store, written again as a checkpoint in another format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from turbomill import console
from turbomill.convert.base import Checkpoint
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.export import BITS, export_format, formats_of
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.linear import Linear, QuantLinear, QuantScheme
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.staged import StagedDirectory, require_space
from turbomill.convert.store.back import StoreCheckpoint
from turbomill.convert.store.check import IGNORED
from turbomill.convert.store.convert import check_destination
from turbomill.convert.store.reader import open_store
from turbomill.convert.writer import MARKER, CheckpointWriter, write_json
from turbomill.errors import CheckpointError, UsageError

TargetFormat = Literal["hf", "awq", "gptq", "gptq_v2", "compressed-tensors"]
TARGETS: tuple[TargetFormat, ...] = get_args(TargetFormat)


def open_any(model: str | Path) -> Checkpoint:
    """A checkpoint, or a store seen as one."""
    path = resolve_model(model)
    return StoreCheckpoint(open_store(path)) if kind_of(path) == "store" else open_checkpoint(path)


def rewrite(model: str | Path, dst: Path, target: TargetFormat, *, force: bool = False) -> Path:
    """Write MODEL, a checkpoint or a store, as a checkpoint at `dst`; whole or not at all.

    Codes, scales, zeros and dense weights are the model's own: nothing is quantized or rounded, except that
    `hf` dequantizes, in the dtype of the scales, and that an embedding or output matrix with codes (GGUF's)
    is written dense in the model's dtype. Raises UsageError for what the format cannot hold, before
    anything is written, and CheckpointError for the model.
    """
    return rewrite_checkpoint(open_any(model), dst, target, force=force)


def rewrite_checkpoint(source: Checkpoint, dst: Path, target: TargetFormat, *, force: bool = False) -> Path:
    """The same of an open checkpoint."""
    dst = Path(dst).expanduser().absolute()
    check_destination(dst, source.path, force, marker=MARKER, what="a checkpoint of turbomill's")
    shapes = source.arch.linear_shapes(source.config)
    sizes = {
        source.arch.layer(index) + name: shapes[name]
        for index in range(source.arch.num_layers(source.config))
        for name in source.arch.linears_of(source.config, index)
    }
    schemes = _schemes(source, sizes)
    form = _format(source, target, schemes, sizes)
    described = form.quantization_config()
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    config = {**config, "quantization_config": described} if described else config
    parameters = sum(k * n for k, n in sizes.values())
    require_space(dst, source.disk_bytes if described or source.scheme is None else 2 * parameters)
    dense = DenseFormat()
    with (
        CheckpointWriter(dst, config, staged=StagedDirectory(dst)) as writer,
        console.progress("rewrite", len(sizes)) as task,
    ):
        for name in source.names():
            if name.rpartition(".")[0] not in sizes and not IGNORED.search(name):
                writer.add(name, source.tensor(name))
        for prefix in sizes:
            linear = _fitting(prefix, source.linear(prefix), target)
            chosen = dense if schemes[prefix] is None else form
            for name, tensor in chosen.pack(prefix, linear).items():
                writer.add(name, tensor)
            source.release()
            task.advance()
        source.copy_sidecars(writer.path)
        if described and target.startswith("gptq"):
            write_json(writer.path / "quantize_config.json", described)
        write_json(
            writer.path / MARKER,
            console.provenance(source=str(source.path), source_fingerprint=source.fingerprint, format=target),
        )
    return dst


def _schemes(source: Checkpoint, sizes: dict[str, tuple[int, int]]) -> dict[str, QuantScheme | None]:
    """Each linear's; with group -1 for all where every group spans its K, however long that is."""
    found = {prefix: source.scheme_of(prefix, k) for prefix, (k, _n) in sizes.items()}
    if all(scheme is None or scheme.group >= sizes[prefix][0] for prefix, scheme in found.items()):
        return {prefix: scheme and replace(scheme, group=-1) for prefix, scheme in found.items()}
    return found


def _format(
    source: Checkpoint,
    target: TargetFormat,
    schemes: dict[str, QuantScheme | None],
    sizes: dict[str, tuple[int, int]],
) -> WeightFormat:
    if target not in TARGETS:
        raise UsageError(f"--to {target}: expected one of {', '.join(TARGETS)}")
    if target == "hf":
        return DenseFormat()
    quantized = {prefix: scheme for prefix, scheme in schemes.items() if scheme is not None}
    if not quantized:
        raise UsageError(
            f"--to {target}: {source.path} is not quantized; see `turbomill lite`, or take --to hf"
        )
    for prefix, scheme in quantized.items():
        if scheme.mins:
            raise UsageError(f"--to {target}: {prefix} has minima (GGUF's Q4_1), not zeros; use --to hf")
        if scheme.bits not in BITS[target]:
            other = " or ".join(formats_of(scheme.bits))
            raise UsageError(f"--to {target}: {prefix} has codes of {scheme.bits} bits; use --to {other}")
    try:
        form = export_format(target, source, schemes)
    except UsageError as error:
        raise UsageError(f"--to {error}") from error
    misfits = [f"{prefix}: {why}" for prefix in quantized if (why := form.misfit(prefix, *sizes[prefix]))]
    if misfits:
        more = f"; and {len(misfits) - 1} more" if len(misfits) > 1 else ""
        raise UsageError(f"--to {target}: {misfits[0]}{more}")
    return form


def _fitting(prefix: str, linear: Linear, target: TargetFormat) -> Linear:
    """The linear, if the format can hold its zeros and its order."""
    if target == "gptq" and isinstance(linear, QuantLinear) and not bool(linear.zeros.all()):
        raise CheckpointError(
            f"{prefix}: has a zero of 0, about which readers of GPTQ v1 disagree; use --to gptq_v2"
        )
    ordered = isinstance(linear, QuantLinear) and linear.order is not None
    if ordered and target in ("awq", "compressed-tensors"):
        raise CheckpointError(
            f"{prefix}: its rows are in an order of their own (desc_act), which only GPTQ holds: --to gptq_v2"
        )
    return linear
