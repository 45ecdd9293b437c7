"""Which weight format a checkpoint has. A new format is one class, and one entry here."""

from __future__ import annotations

import re
from typing import Any

from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.errors import CheckpointError, UnsupportedModelError

FORMATS: tuple[type[WeightFormat], ...] = (DenseFormat, AwqFormat, GptqFormat, CompressedTensorsFormat)


def find_format(config: dict[str, Any]) -> WeightFormat:
    """The format config.json describes. Raises UnsupportedModelError for one that is not known."""
    for candidate in FORMATS:
        try:
            found = candidate.recognise(config)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, re.error) as error:
            raise CheckpointError(f"config.json: quantization_config is malformed: {error}") from error
        if found is not None:
            return found
    method = config["quantization_config"].get("quant_method", "missing")
    raise UnsupportedModelError(
        f"config.json: quant_method {method} is not supported; supported: "
        f"{', '.join(candidate.name for candidate in FORMATS)}, fp8"
    )
