"""A whole quantization run: check, calibrate and quantize layer by layer, write the checkpoint."""

from __future__ import annotations

import csv
import gc
import logging
import resource
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from turbomill import console
from turbomill.calib_data import Windows, load_windows
from turbomill.convert.checkpoint import Checkpoint, open_checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.reference import load_dense_model
from turbomill.convert.writer import CheckpointWriter, write_json
from turbomill.errors import UsageError
from turbomill.quant.checks import MARKER, check_finite, check_run
from turbomill.quant.decoder import StreamedDecoder
from turbomill.quant.export import export_format, format_name, smallest_zero
from turbomill.quant.grid import GridSpec
from turbomill.quant.inputs import InputStats
from turbomill.quant.layer import LayerWork, Stage, quantize_stage, round_weights, stages
from turbomill.quant.options import METHODS, LayerRow, Method, QuantOptions, QuantResult
from turbomill.quant.recipe import RECIPES, Recipe
from turbomill.quant.stream import Stream

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
    checkpoint = open_checkpoint(model)
    check_run(checkpoint, work_dir, method, options)
    check_finite(checkpoint)
    calibration = None if method == "rtn" else calibration_windows(checkpoint, options)
    name = format_name(options.format, method)
    form = export_format(name, options.scheme, checkpoint)
    config = {**checkpoint.config, "quantization_config": form.quantization_config()}
    with CheckpointWriter(work_dir, config, options.max_shard_bytes) as writer:
        rows = _write_layers(checkpoint, writer, form, method, options, calibration)
        checkpoint.copy_sidecars(writer.path)
        if name != "compressed-tensors":
            write_json(writer.path / "quantize_config.json", form.quantization_config())
        write_log(writer.path / LOG, rows)
        seconds = time.monotonic() - start
        described = calibration.describe() if calibration else None
        made = console.provenance(
            source=str(checkpoint.path),
            source_fingerprint=checkpoint.fingerprint,
            method=method,
            options=options.describe(),
            calibration=described,
            seconds=round(seconds, 3),
            peak_bytes=peak_bytes(),
            fallbacks=[f"layer {row.layer} {row.linear}" for row in rows if row.fallback],
        )
        write_json(writer.path / MARKER, made)
    size = sum(file.stat().st_size for file in work_dir.glob("*.safetensors"))
    return QuantResult(
        work_dir, method, str(options.scheme), seconds, peak_bytes(), size, described, tuple(rows)
    )


def calibration_windows(checkpoint: Checkpoint, options: QuantOptions) -> Windows:
    """The windows the options ask for, cut with the checkpoint's tokenizer (or sampled from the model:
    `self`).

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


def _write_layers(
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    form: WeightFormat,
    method: Method,
    options: QuantOptions,
    calibration: Windows | None,
) -> list[LayerRow]:
    """Copy what is not a decoder layer, then quantize and write the layers one after the other."""
    decoder = StreamedDecoder(checkpoint, device_of(options.device))
    recipe = RECIPES[method]
    arch, config = decoder.arch, checkpoint.config
    prefixes = [arch.layer(index) for index in range(decoder.num_layers)]
    by_layer: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in checkpoint.names():
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        if prefix is None:
            writer.add(name, checkpoint.tensor(name))
        else:
            by_layer[prefix].append(name)

    dtype = torch.bfloat16 if checkpoint.dtype == torch.bfloat16 else torch.float16
    spec = GridSpec(options.scheme, dtype, smallest_zero(format_name(options.format, method)))
    plan = stages([fusion.parts for fusion in arch.fusions], arch.scale_groups(config))
    head_dim = int(arch.model_config(config)["head_dim"])
    # What the quantized layers give and, where the recipe corrects for the drift, the full-precision ones.
    streams: list[Stream] = []
    if calibration is not None:
        hidden = decoder.embed(calibration.batches(options.batch_of(calibration.length)))
        streams = [Stream(decoder, list(hidden)) for _ in range(1 + recipe.correct)]
        del hidden
    rows: list[LayerRow] = []
    with torch.no_grad(), console.progress(f"{method} {options.scheme}", decoder.num_layers) as task:
        for index, prefix in enumerate(prefixes):
            work = LayerWork(
                index,
                decoder.load(index),
                spec,
                head_dim,
                stored_as=lambda name, prefix=prefix: checkpoint.dtype_of(prefix + name),
                norm_offset=arch.norm_offset,
            )
            if streams:
                _calibrated(work, decoder, plan, streams, recipe, options)
            else:
                round_weights(work, arch.linears)
            _write(work, checkpoint, writer, form, prefix, by_layer[prefix])
            rows += work.rows
            task.advance()
            del work
            gc.collect()  # modules hold cycles; without this two layers' weights pile up
    return rows


def _calibrated(
    work: LayerWork,
    decoder: StreamedDecoder,
    plan: list[Stage],
    streams: list[Stream],
    recipe: Recipe,
    options: QuantOptions,
) -> None:
    """Each stage in turn: gather its inputs behind the stages already quantized, then quantize it."""
    stream, *full = streams
    stream.enter(work.module, work.index)
    for other in full:
        other.enter(decoder.load(work.index), work.index)
    for stage in plan:
        first = stage.linears[0]
        stats = InputStats(work.weight(first).shape[1], decoder.device)
        for inputs in zip(*(one.inputs(first) for one in streams), strict=True):
            stats.add(*inputs)
        if quantize_stage(work, stage, stats, recipe, options):
            stream.forget()  # the scale is now in the values that were attended to
    if work.index + 1 < decoder.num_layers:
        for one in streams:
            one.leave()


def _write(
    work: LayerWork,
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    form: WeightFormat,
    prefix: str,
    names: list[str],
) -> None:
    """Write one layer: linears packed, other tensors in their own dtype, as the module now has them."""
    state: dict[str, Any] = work.module.state_dict()
    for name in names:
        short = name.removeprefix(prefix)
        linear, _, kind = short.rpartition(".")
        if linear in work.done:
            if kind == "weight":
                bias = work.bias(linear)
                stored = None if bias is None else bias.to(checkpoint.dtype_of(f"{prefix}{linear}.bias"))
                packed = work.done[linear].linear(stored)
                packed.validate(prefix + linear)
                for key, tensor in form.pack(prefix + linear, packed).items():
                    writer.add(key, tensor)
        elif short in state:
            writer.add(name, state[short].to("cpu", checkpoint.dtype_of(name)))
        else:  # not a parameter of the layer (old checkpoints carry RoPE's frequencies): as it is
            writer.add(name, checkpoint.tensor(name))


def write_log(path: Path, rows: list[LayerRow]) -> None:
    """quant_log.csv: one row per linear."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(LayerRow)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)


def peak_bytes() -> int:
    """The process's largest resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
