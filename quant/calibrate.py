"""Input statistics of every decoder linear at full precision, for looking at and for other tools."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill import console
from turbomill.convert.checkpoint import open_dense
from turbomill.convert.runnable import runnable
from turbomill.convert.staged import StagedDirectory
from turbomill.convert.writer import MARKER, write_json
from turbomill.quant.checks import check_dense, check_finite, check_work_dir
from turbomill.quant.decoder import StreamedDecoder, watching
from turbomill.quant.options import QuantOptions
from turbomill.quant.run import calibration_windows, device_of, peak_bytes

STATISTICS = "calibration.safetensors"
SUMMARY = "calibration.json"
# Projections whose outputs are cached: their ranges say how well a KV cache quantizes.
CACHED = ("k_proj", "v_proj")


class ChannelStats:
    """Running statistics over tokens of a vector x [K], fp32."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.tokens = 0
        self._sum = torch.zeros(channels, device=device)  # sum of |x|
        self._squares = torch.zeros(channels, device=device)
        self._largest = torch.zeros(channels, device=device)

    def add(self, x: Tensor) -> None:
        """Count x [..., K]."""
        x = x.reshape(-1, x.shape[-1]).float()
        magnitude = x.abs()
        self._sum += magnitude.sum(0)
        self._squares += x.square().sum(0)
        self._largest = torch.maximum(self._largest, magnitude.amax(0))
        self.tokens += x.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """absmean, absmax and mean_square, each [K], on the CPU."""
        n = max(self.tokens, 1)
        found = {"absmean": self._sum / n, "absmax": self._largest, "mean_square": self._squares / n}
        return {name: tensor.cpu() for name, tensor in found.items()}


@dataclass(frozen=True)
class CalibrationResult:
    """A finished `lite calibrate`."""

    work_dir: Path
    seconds: float
    peak_bytes: int
    calibration: dict[str, Any]
    linears: dict[str, dict[str, float]]

    def summary(self) -> dict[str, Any]:
        """For `--json`."""
        return {**self.__dict__, "work_dir": str(self.work_dir)}


@torch.no_grad()
def calibrate(
    model: str | Path, work_dir: Path | str, options: QuantOptions | None = None
) -> CalibrationResult:
    """Run the calibration windows through MODEL and write calibration.safetensors and calibration.json.

    Per linear: `NAME.input.absmean`, `.absmax`, `.mean_square`, fp32 [K]. For k_proj (before RoPE) and v_proj
    also `NAME.output.absmax`, fp32 [Nkv, D]. Names are those of the code that runs the model: Llama's for
    InternLM2 and Baichuan.
    """
    from safetensors.torch import save_file

    start = time.monotonic()
    options = options or QuantOptions()
    work_dir = Path(work_dir)
    checkpoint = open_dense(model)
    check_dense(checkpoint)
    check_work_dir(work_dir, options.overwrite)
    check_finite(checkpoint)
    windows = calibration_windows(checkpoint, options)
    model_run = runnable(checkpoint)
    decoder = StreamedDecoder(model_run, device_of(options.device))
    head_dim = int(decoder.arch.model_config(model_run.config)["head_dim"])
    hidden = decoder.embed(windows.batches(options.batch_of(windows.length)))
    tensors: dict[str, Tensor] = {}
    linears: dict[str, dict[str, float]] = {}
    with console.progress("calibrate", decoder.num_layers) as task:
        for index in range(decoder.num_layers):
            layer = decoder.load(index)
            sizes = decoder.arch.linear_shapes(model_run.config)
            shapes = {name: sizes[name] for name in decoder.arch.linears_of(model_run.config, index)}
            inputs = {name: ChannelStats(k, decoder.device) for name, (k, _n) in shapes.items()}
            outputs = {
                name: ChannelStats(n, decoder.device)
                for name, (_k, n) in shapes.items()
                if name.endswith(CACHED)
            }

            def seen(name: str, x: Tensor, y: Tensor, inputs=inputs, outputs=outputs) -> None:
                inputs[name].add(x)
                if name in outputs:
                    outputs[name].add(y)

            hooks = {name: lambda x, y, name=name: seen(name, x, y) for name in inputs}
            with watching(layer, hooks):
                for i, batch in enumerate(hidden):
                    hidden[i] = decoder.run(layer, index, batch)
            prefix = decoder.arch.layer(index)
            for name, stats in inputs.items():
                found = stats.tensors()
                tensors |= {f"{prefix}{name}.input.{kind}": tensor for kind, tensor in found.items()}
                linears[prefix + name] = _describe(found)
            for name, stats in outputs.items():
                by_head = stats.tensors()["absmax"].reshape(-1, head_dim)  # [Nkv, D]
                tensors[f"{prefix}{name}.output.absmax"] = by_head
                linears[prefix + name]["output_absmax"] = float(by_head.max())
            task.advance()
    seconds = time.monotonic() - start
    with StagedDirectory(work_dir) as temp:
        save_file(tensors, temp / STATISTICS)
        write_json(temp / SUMMARY, {"tokens": windows.ids.numel(), "linears": linears})
        made = console.provenance(
            source=str(checkpoint.path),
            source_fingerprint=checkpoint.fingerprint,
            options=options.describe(),
            calibration=windows.describe(),
            seconds=round(seconds, 3),
        )
        write_json(temp / MARKER, made)
    return CalibrationResult(work_dir, seconds, peak_bytes(), windows.describe(), linears)


def _describe(found: dict[str, Tensor]) -> dict[str, float]:
    """A linear's inputs in three numbers; `outlier` is the largest channel's mean over the median
    channel's."""
    absmean = found["absmean"]
    return {
        "absmean": float(absmean.mean()),
        "absmax": float(found["absmax"].max()),
        "outlier": float(absmean.max() / absmean.median().clamp(min=1e-12)),
    }
