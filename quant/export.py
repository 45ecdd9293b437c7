"""Which format a quantized checkpoint is written in."""

from __future__ import annotations

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.export import BITS, EXPORT_FORMATS, ExportFormat, export_format, formats_of
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.runnable import runnable
from turbomill.errors import UsageError
from turbomill.quant.mixed import Allocation
from turbomill.quant.options import Method, QuantOptions


def format_name(asked: str, method: Method, mixed: bool = False) -> ExportFormat:
    """What `--format` asks for; empty: the format that the method is known by. Raises UsageError.

    Schemes that differ from linear to linear (`mixed`) are written as compressed-tensors' config groups.
    """
    if mixed:
        if asked not in ("", "compressed-tensors"):
            raise UsageError(
                f"--format {asked}: --budget mixes schemes, which compressed-tensors alone holds"
            )
        return "compressed-tensors"
    if not asked:
        return "awq" if method == "awq" else "gptq"
    if asked not in EXPORT_FORMATS:
        raise UsageError(f"--format {asked}: expected one of {', '.join(EXPORT_FORMATS)}")
    return asked  # type: ignore[return-value]


def check_bits(name: ExportFormat, bits: int) -> None:
    """Raise UsageError when the format has no codes of so many bits."""
    if bits not in BITS[name]:
        raise UsageError(
            f"--w-bits {bits}: {name} checkpoints hold {', '.join(map(str, BITS[name]))} bits; "
            f"use --format {' or '.join(formats_of(bits))}"
        )


def written_format(
    name: ExportFormat, checkpoint: Checkpoint, options: QuantOptions, allocation: Allocation | None = None
) -> WeightFormat:
    """The format of the checkpoint to write: one scheme for all linears, or the allocation's for each."""
    arch, config = checkpoint.arch, checkpoint.config
    if allocation is None:
        return export_format(name, checkpoint, dict.fromkeys(arch.linear_prefixes(config), options.scheme))
    model = runnable(checkpoint)
    schemes = {
        arch.layer(index) + linear: allocation.schemes[model.arch.layer(index) + model.parts_of(linear)[0]]
        for index in range(arch.num_layers(config))
        for linear in arch.linears_of(config, index)
    }
    return export_format(name, checkpoint, schemes)
