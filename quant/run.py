"""A whole quantization run: check, calibrate and quantize layer by layer, write the checkpoint."""

from __future__ import annotations

import gc
import logging
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turbomill import console
from turbomill.calib_data import Windows, load_windows
from turbomill.convert.checkpoint import Checkpoint, open_dense
from turbomill.convert.export import ExportFormat, smallest_zero
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.runnable import runnable
from turbomill.convert.staged import ResumableDirectory, require_space
from turbomill.convert.writer import MARKER, CheckpointWriter, write_json
from turbomill.errors import UsageError
from turbomill.quant.activations import choose
from turbomill.quant.checks import check_finite, check_run, padded, with_group
from turbomill.quant.decoder import StreamedDecoder
from turbomill.quant.estimate import activation_bytes, estimate
from turbomill.quant.export import format_name, written_format
from turbomill.quant.grid import GridSpec
from turbomill.quant.layer import LayerWork, round_weights
from turbomill.quant.mixed import Allocation, mixed_schemes
from turbomill.quant.options import METHODS, LayerRow, Method, QuantOptions, QuantResult
from turbomill.quant.recipe import recipe_of
from turbomill.quant.resume import identity, written_model
from turbomill.quant.stages import calibrate_layer, plan_layer
from turbomill.quant.stream import Stream
from turbomill.quant.written import names_by_layer, write_layer, write_log

logger = logging.getLogger("turbomill.quant")

LOG = "quant_log.csv"


def quantize(
    model: str | Path, work_dir: Path | str, method: Method, options: QuantOptions | None = None
) -> QuantResult:
    """Quantize MODEL's decoder linears and write an HF checkpoint into `work_dir`, whole or not at all.

    The format is `options.format`, or else GPTQ v1 for `rtn` and `gptq`, AWQ gemm for `awq`; embeddings,
    norms and head stay as they are, apart from the norms AWQ folds its scales into. Beside the weights lie
    quant_log.csv (a row per linear), turbomill.json (provenance) and, where the format has one,
    quantize_config.json. Raises TurbomillError, in one line, before work begins.
    """
    start = time.monotonic()
    options = options or QuantOptions()
    if method not in METHODS:
        raise UsageError(f"method {method}: expected one of {', '.join(METHODS)}")
    work_dir = Path(work_dir)
    checkpoint = open_dense(model)
    if options.pad:
        checkpoint = padded(checkpoint, options.group)
    options = with_group(checkpoint, options)
    check_run(checkpoint, work_dir, method, options)
    device, name = device_of(options.device), format_name(options.format, method, bool(options.budget))
    same = identity(checkpoint, method, name, options, device)
    if options.overwrite or not ResumableDirectory.check(work_dir, same):
        check_finite(checkpoint)  # what an unfinished run has read before
    calibration = None if method == "rtn" else calibration_windows(checkpoint, options)
    described = calibration.describe() if calibration else None
    staged = ResumableDirectory(
        work_dir, {**same, "calibration data": described and described["sha256"]}, options.overwrite
    )
    recipe = recipe_of(method, options.correct)
    expected = estimate(checkpoint, calibration, recipe, options, device)
    logger.info("%s", expected)
    if not staged.temp.is_dir():  # else a run that is gone on with, and some of it is there
        require_space(work_dir, int(expected.disk))
    allocation = None
    if options.budget and calibration:
        with torch.no_grad():
            allocation = mixed_schemes(
                runnable(checkpoint), calibration.ids, options, scale_dtype(checkpoint), device
            )
    form = written_format(name, checkpoint, options, allocation)
    run = _Run(checkpoint, method, options, name, form, calibration, allocation)
    config = {**checkpoint.config, "quantization_config": form.quantization_config()}
    try:
        with CheckpointWriter(work_dir, config, options.max_shard_bytes, staged) as writer:
            rows = _Layers(run, writer, device).write(list(staged.entries))
            seconds = time.monotonic() - start
            _write_sidecars(run, writer.path, rows, seconds)
    except staged.KEPT:
        if staged.temp.is_dir():
            logger.warning(
                "stopped: %d of %d layers are kept in %s; the same command goes on from there",
                *(len(staged.entries) - 1, checkpoint.arch.num_layers(checkpoint.config), staged.temp),
            )
        raise
    size = sum(file.stat().st_size for file in work_dir.glob("*.safetensors"))
    return QuantResult(
        work_dir, method, str(options.scheme), seconds, peak_bytes(), size, described, tuple(rows)
    )


@dataclass(frozen=True)
class _Run:
    """What is quantized, and how."""

    checkpoint: Checkpoint
    method: Method
    options: QuantOptions
    format_name: ExportFormat
    form: WeightFormat
    calibration: Windows | None
    allocation: Allocation | None

    def scheme_of(self, linear: str) -> QuantScheme:
        """Of a linear, by its full name in the code that runs the model."""
        return self.allocation.schemes[linear] if self.allocation else self.options.scheme


def _write_sidecars(run: _Run, path: Path, rows: list[LayerRow], seconds: float) -> None:
    run.checkpoint.copy_sidecars(path)
    if run.format_name != "compressed-tensors":
        write_json(path / "quantize_config.json", run.form.quantization_config())
    write_log(path / LOG, rows)
    made = console.provenance(
        source=str(run.checkpoint.path),
        source_fingerprint=run.checkpoint.fingerprint,
        method=run.method,
        options=run.options.describe(),
        calibration=run.calibration and run.calibration.describe(),
        allocation=run.allocation and run.allocation.describe(),
        seconds=round(seconds, 3),
        peak_bytes=peak_bytes(),
        fallbacks=[f"layer {row.layer} {row.linear}" for row in rows if row.fallback],
    )
    write_json(path / MARKER, made)


def calibration_windows(checkpoint: Checkpoint, options: QuantOptions) -> Windows:
    """The windows the options ask for, cut with the checkpoint's tokenizer (or sampled from the model:
    `self`, `free`).

    Windows are never longer than the positions the model was trained on.
    """
    length, limit = options.calib_seqlen, checkpoint.config.get("max_position_embeddings")
    if isinstance(limit, int) and length > limit:
        logger.warning("--calib-seqlen %d: the model has %d positions, windows are that long", length, limit)
        length = limit
    return load_windows(
        options.calib_dataset,
        checkpoint.tokenizer(),
        options.calib_samples,
        length,
        seed=options.seed,
        model=lambda: load_dense_model(checkpoint, torch.float32),
    )


def scale_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What scales are stored in: a bf16 model stays bf16."""
    return torch.bfloat16 if checkpoint.dtype == torch.bfloat16 else torch.float16


def device_of(name: str) -> torch.device:
    """The device `--device` asks for; auto is the first GPU, if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


class _Layers:
    """The loop over a model's layers: quantize and write each, or replay one that is already written."""

    def __init__(self, run: _Run, writer: CheckpointWriter, device: torch.device) -> None:
        self.run, self.writer = run, writer
        self.model = runnable(run.checkpoint)
        self.decoder = StreamedDecoder(self.model, device)
        self.recipe = recipe_of(run.method, run.options.correct)
        arch, config = self.model.arch, self.model.config
        self.sizes = arch.linear_shapes(config)
        self.head_dim = int(arch.model_config(config)["head_dim"])
        # What the quantized layers give and, if the recipe corrects for the drift, the full-precision ones.
        self.streams: list[Stream] = []
        if run.calibration is not None:
            batches = run.calibration.batches(run.options.batch_of(run.calibration.length))
            count = 1 + self.recipe.correct
            kept = choose(
                activation_bytes(self.model, run.calibration, count), run.options.spool, writer.path
            )
            self.streams = [
                Stream(self.decoder, self.decoder.embeddings(batches), kept) for _ in range(count)
            ]

    def write(self, done: list[dict[str, Any]]) -> list[LayerRow]:
        """Copy what is not a decoder layer, then the layers; `done` are the parts already written."""
        others, layers = names_by_layer(self.run.checkpoint)
        if not done:
            for name in others:
                self.writer.add(name, self.run.checkpoint.tensor(name))
                self.model.release()
            self.writer.commit({"rows": []})
        rows = [LayerRow(**row) for part in done for row in part["rows"]]
        finished, count = max(len(done) - 1, 0), self.decoder.num_layers
        if finished:
            logger.info("going on with an unfinished run: %d of %d layers are done", finished, count)
        title = f"{self.run.method} {self.run.options.scheme}"
        with torch.no_grad(), console.progress(title, count) as task:
            for index, names in enumerate(layers):
                if index >= finished:
                    rows += self._quantize(index, names)
                elif finished < count:
                    self._replay(index)
                task.advance()
                self.model.release()
                gc.collect()  # modules hold cycles; without this two layers' weights pile up
        return rows

    def _quantize(self, index: int, names: list[str]) -> list[LayerRow]:
        model, arch = self.model, self.model.arch
        work = LayerWork(
            index,
            self.decoder.load(index),
            lambda name: self._spec(index, name),
            self.head_dim,
            stored_as=lambda name: model.dtype_of(arch.layer(index) + name),
            norm_offset=arch.norm_offset,
        )
        if self.streams:
            self._enter(work.module, index)
            plan = plan_layer(arch, model.config, index)
            calibrate_layer(work, plan, self.streams, self.recipe, self.run.options)
            self._leave(index)
        else:
            round_weights(work, arch.linears_of(model.config, index))
        write_layer(work, model, self.writer, self.run.form, names)
        self.writer.commit({"rows": [asdict(row) for row in work.rows]})
        return work.rows

    def _spec(self, index: int, name: str) -> GridSpec:
        """What the grid of a layer's linear may be; a group of -1 is all of K."""
        scheme = self.run.scheme_of(self.model.arch.layer(index) + name)
        if scheme.group < 0:
            scheme = replace(scheme, group=self.sizes[name][0])
        return GridSpec(scheme, scale_dtype(self.model), smallest_zero(self.run.format_name))

    def _replay(self, index: int) -> None:
        """Bring the streams behind a layer that an earlier run wrote."""
        if self.streams:
            written = written_model(self.model, self.writer, self.run.form)
            self._enter(self.decoder.load(index, written), index)
            self._leave(index)

    def _enter(self, module: nn.Module, index: int) -> None:
        stream, *full = self.streams
        stream.enter(module, index)
        for other in full:
            other.enter(self.decoder.load(index), index)

    def _leave(self, index: int) -> None:
        if index + 1 < self.decoder.num_layers:
            for stream in self.streams:
                stream.leave()


def peak_bytes() -> int:
    """The process's largest resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
