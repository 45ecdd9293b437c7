"""A quantization as a run of the report: what happened to each linear, from `turbomill lite`'s own files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from turbomill.errors import TurbomillError
from turbomill.reports.runs import LayerResult, Run
from turbomill.reports.tables import number

MARKER, LOG = "turbomill.json", "quant_log.csv"
COLUMNS = ("linear", "scheme", "method", "loss if rounded", "loss", "weight error", "tokens", "seconds")
NOTE = (
    "Loss is the squared error of the linear's output on the calibration text, over the output's own square; "
    "a linear that came out worse than rounding to nearest fell back to it."
)


def is_quantization(path: Path) -> bool:
    """Whether `path` is a directory that `turbomill lite` wrote."""
    return (path / LOG).is_file() and (path / MARKER).is_file()


def load_quantization(path: Path) -> Run:
    """The run of a quantized checkpoint. Raises TurbomillError naming the file."""
    try:
        made = json.loads((path / MARKER).read_text(encoding="utf-8"))
        with (path / LOG).open(newline="", encoding="utf-8") as file:
            layers = [_row(row) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError) as error:
        raise TurbomillError(f"{path / LOG}: not what turbomill lite writes ({error!r})") from None
    made["settings"] = made.pop("options", {})
    return Run(kind="quantize", layers=layers, provenance=made)


def _row(row: dict[str, str]) -> LayerResult:
    def maybe(text: str | None) -> float | None:
        return float(text) if text else None

    tokens = maybe(row.get("tokens"))
    return LayerResult(
        layer=int(row["layer"]),
        linear=row["linear"],
        method=row["method"],
        weight_error=float(row["weight_error"]),
        rtn_loss=maybe(row["rtn_loss"]),
        loss=maybe(row["loss"]),
        fallback=row["fallback"] == "True",
        seconds=float(row["seconds"]),
        tokens=None if tokens is None else int(tokens),
        scheme=row.get("scheme", ""),
    )


def layer_rows(layers: list[LayerResult]) -> list[tuple[str, ...]]:
    """The cells of each linear under COLUMNS."""
    return [
        (
            f"{row.layer} {row.linear}",
            row.scheme or "-",
            f"{row.method}, fell back" if row.fallback else row.method,
            *("-" if loss is None else number(loss, 6) for loss in (row.rtn_loss, row.loss)),
            number(row.weight_error, 6),
            "-" if row.tokens is None else f"{row.tokens:,}",
            number(row.seconds, 2),
        )
        for row in layers
    ]


def sentence(run: Run) -> str:
    """What the run was, in one line."""
    layers = run.layers
    fell = sum(row.fallback for row in layers)
    better = [row.loss / row.rtn_loss for row in layers if row.loss is not None and row.rtn_loss]
    text = f"{run.provenance.get('method', 'quantize')}: {len(layers)} linears in "
    text += f"{number(float(run.provenance.get('seconds', 0.0)), 1)} s"
    if better:
        middle = sorted(better)[len(better) // 2]
        text += f"; the median linear errs {number(middle, 2)} times as much as rounded to nearest"
    return f"{text}; {fell} fell back to rounding." if fell else f"{text}."
