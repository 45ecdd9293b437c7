"""The formats a quantized checkpoint can be written in, and what each of them can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.formats import compressed_tensors, gptq
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.runnable import runnable
from turbomill.errors import UsageError
from turbomill.quant.options import Method

ExportFormat = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
BITS: dict[ExportFormat, tuple[int, ...]] = {
    "awq": (4,),
    "gptq": gptq.BITS,
    "gptq_v2": gptq.BITS,
    "compressed-tensors": tuple(compressed_tensors.BITS),
}


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


def smallest_zero(name: ExportFormat) -> int:
    """GPTQ v1 stores zero - 1, and readers disagree about a zero of 0: its grids never have one."""
    return 1 if name == "gptq" else 0


def check_bits(name: ExportFormat, bits: int) -> None:
    """Raise UsageError when the format has no codes of so many bits."""
    if bits in BITS[name]:
        return
    works = [other for other in EXPORT_FORMATS if bits in BITS[other]]
    raise UsageError(
        f"--w-bits {bits}: {name} checkpoints hold {', '.join(map(str, BITS[name]))} bits; "
        f"use --format {' or '.join(works)}"
    )


def export_format(
    name: ExportFormat,
    scheme: QuantScheme,
    checkpoint: Checkpoint,
    schemes: Mapping[str, QuantScheme] | None = None,
) -> WeightFormat:
    """The format of a checkpoint whose decoder linears all have `scheme`, or each the one in `schemes`, which
    are by the full names in the code that runs the model.

    Its config says which of the decoder's matrices stay dense (a router, a gate), for readers that would
    otherwise look for their codes.
    """
    if name == "awq":
        return AwqFormat(scheme, _dense_modules(checkpoint))
    if name == "compressed-tensors":
        ignore = ("lm_head", *_dense_modules(checkpoint))
        if not schemes:
            return CompressedTensorsFormat(scheme, ignore=ignore)
        arch, config, model = checkpoint.arch, checkpoint.config, runnable(checkpoint)
        published = {
            arch.layer(index) + name: schemes[model.arch.layer(index) + model.parts_of(name)[0]]
            for index in range(arch.num_layers(config))
            for name in arch.linears_of(config, index)
        }
        return CompressedTensorsFormat.mixed(published, ignore)
    skipped = {f"-:{pattern}": {} for pattern in _dense_patterns(checkpoint)}
    return GptqFormat(scheme, 2 if name == "gptq_v2" else 1, skipped)


def _dense_modules(checkpoint: Checkpoint) -> list[str]:
    """The matrices of the decoder layers that are never quantized, by their full names."""
    arch, config = checkpoint.arch, checkpoint.config
    layers = range(arch.num_layers(config))
    return [arch.layer(index) + name for index in layers for name in arch.matrices(config, index)]


def _dense_patterns(checkpoint: Checkpoint) -> list[str]:
    """The same as regular expressions, one for all layers."""
    arch, config = checkpoint.arch, checkpoint.config
    names = {name: None for index in range(arch.num_layers(config)) for name in arch.matrices(config, index)}
    before, after = arch.layer_prefix.split("{i}")
    return [rf"{re.escape(before)}\d+{re.escape(after + name)}$" for name in names]
