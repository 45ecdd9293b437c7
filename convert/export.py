"""The formats a quantized checkpoint can be written in, and what each of them can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

from turbomill.convert.base import Checkpoint
from turbomill.convert.formats import compressed_tensors, gptq
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.errors import UsageError

ExportFormat = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
BITS: dict[ExportFormat, tuple[int, ...]] = {
    "awq": (4,),
    "gptq": gptq.BITS,
    "gptq_v2": gptq.BITS,
    "compressed-tensors": tuple(compressed_tensors.BITS),
}


def smallest_zero(name: ExportFormat) -> int:
    """GPTQ v1 stores zero - 1, and readers disagree about a zero of 0: its grids never have one."""
    return 1 if name == "gptq" else 0


def formats_of(bits: int) -> list[ExportFormat]:
    """The formats that have codes of so many bits."""
    return [name for name in EXPORT_FORMATS if bits in BITS[name]]


def export_format(
    name: ExportFormat, checkpoint: Checkpoint, schemes: Mapping[str, QuantScheme | None]
) -> WeightFormat:
    """The format of a checkpoint whose decoder linears have these schemes, by full name; None stays dense.

    Its config names what stays dense, for readers that would otherwise look for its codes. Raises UsageError
    for schemes that differ where the format has one for all.
    """
    found = {scheme for scheme in schemes.values() if scheme is not None}
    dense = [prefix for prefix, scheme in schemes.items() if scheme is None]
    if not found:
        return DenseFormat()
    if name == "compressed-tensors":
        ignore = ("lm_head", *_matrices(checkpoint), *dense)
        quantized = {prefix: scheme for prefix, scheme in schemes.items() if scheme is not None}
        return CompressedTensorsFormat.mixed(quantized, ignore)
    if len(found) > 1:
        raise UsageError(
            f"{name}: the linears have {len(found)} schemes ({', '.join(sorted(map(str, found)))}), "
            "which compressed-tensors alone holds"
        )
    scheme = found.pop()
    if name == "awq":
        return AwqFormat(scheme, [*_matrices(checkpoint), *dense])
    skipped = [*_matrix_patterns(checkpoint), *(f"{re.escape(prefix)}$" for prefix in dense)]
    return GptqFormat(scheme, 2 if name == "gptq_v2" else 1, {f"-:{pattern}": {} for pattern in skipped})


def _matrices(checkpoint: Checkpoint) -> list[str]:
    """The matrices of the decoder layers that are never quantized (a router, a gate), by full names."""
    arch, config = checkpoint.arch, checkpoint.config
    layers = range(arch.num_layers(config))
    return [arch.layer(index) + name for index in layers for name in arch.matrices(config, index)]


def _matrix_patterns(checkpoint: Checkpoint) -> list[str]:
    """The same as regular expressions, one for all layers."""
    arch, config = checkpoint.arch, checkpoint.config
    names = {name: None for index in range(arch.num_layers(config)) for name in arch.matrices(config, index)}
    before, after = arch.layer_prefix.split("{i}")
    return [rf"{re.escape(before)}\d+{re.escape(after + name)}$" for name in names]
