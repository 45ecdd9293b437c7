"""Everything that can be known to fail is found here, before any calibration."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from turbomill import console
from turbomill.calib_data import check_name
from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.padded import PaddedCheckpoint, padded_sizes
from turbomill.convert.store.check import IGNORED
from turbomill.convert.writer import MARKER
from turbomill.errors import CheckpointError, UsageError
from turbomill.quant.budget import candidates
from turbomill.quant.export import check_bits, format_name, written_format
from turbomill.quant.options import Method, QuantOptions

logger = logging.getLogger("turbomill.quant")

GROUPS = (128, 64, 32)
FINITE_PIECE = 2**24  # elements looked at together


def check_run(checkpoint: Checkpoint, work_dir: Path, method: Method, options: QuantOptions) -> None:
    """Raise for options this model or format cannot take, an unknown data set, or a work dir that is not
    ours."""
    check_dense(checkpoint)
    name = format_name(options.format, method, bool(options.budget))
    if options.budget:
        candidates(options.scheme, [k for k, _n in _shapes(checkpoint).values()], options.budget)
    check_bits(name, options.bits)
    check_shapes(checkpoint, written_format(name, checkpoint, options), options)
    if method != "rtn":
        check_name(options.calib_dataset)
    check_work_dir(work_dir, options.overwrite)


def check_dense(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model that is already quantized or lacks a tensor that calibration runs
    on."""
    if checkpoint.scheme is not None:
        raise CheckpointError(
            f"{checkpoint.path}: already quantized ({checkpoint.format.name} {checkpoint.scheme}); "
            "give the full-precision model"
        )
    arch, config = checkpoint.arch, checkpoint.config
    shapes, biases = arch.linear_shapes(config), arch.linear_biases(config)
    wanted: dict[str, tuple[int, ...]] = dict(arch.other_weights(config))
    for index in range(arch.num_layers(config)):
        prefix = arch.layer(index)
        for name in arch.linears_of(config, index):
            k, n = shapes[name]
            wanted[f"{prefix}{name}.weight"] = (n, k)
            if biases[name]:
                wanted[f"{prefix}{name}.bias"] = (n,)
    wrong = [f"{name} missing" for name in wanted if not checkpoint.has(name)]
    wrong += [
        f"{name} is {list(checkpoint.shape(name))}, expected {list(shape)}"
        for name, shape in wanted.items()
        if checkpoint.has(name) and checkpoint.shape(name) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(wrong[:5])}{more}")
    extra = [name for name in checkpoint.names() if name not in wanted and not IGNORED.search(name)]
    extra = [name for name in extra if not (checkpoint.tied and name == arch.head)]
    if extra:
        logger.warning(
            "%s: not part of %s, copied as they are: %s", checkpoint.path, arch.name, _some(extra, 5)
        )


def check_shapes(checkpoint: Checkpoint, form: WeightFormat, options: QuantOptions) -> None:
    """Raise UsageError listing every linear whose K the group does not divide, or that the format cannot
    pack."""
    shapes = _shapes(checkpoint)
    arch, config = checkpoint.arch, checkpoint.config
    ragged = [f"{name} K={k}" for name, (k, _n) in shapes.items() if k % max(options.group, 1)]
    if ragged:
        works = [f"--w-group-size {g}" for g in GROUPS if all(k % g == 0 for k, _n in shapes.values())]
        again = arch.linear_shapes({**config, **padded_sizes(config, options.group)})
        if all(again[name][0] % options.group == 0 for name in shapes):
            works.append("--pad (zeros in the MLPs, which change no result)")
        raise UsageError(
            f"--w-group-size {options.group}: does not divide {_some(ragged)}; for this model "
            + (f"use {' or '.join(works)}" if works else f"none of {', '.join(map(str, GROUPS))} does")
        )
    uneven = [f"{name}: {wrong}" for name, (k, n) in shapes.items() if (wrong := form.misfit(name, k, n))]
    if uneven:
        raise UsageError(f"--format {form.name}: {_some(uneven)}; use --format compressed-tensors")


def padded(checkpoint: Checkpoint, group: int) -> Checkpoint:
    """The checkpoint with the inner sizes of its MLPs rounded up to whole groups."""
    check_dense(checkpoint)
    if group < 0:
        return checkpoint
    found = PaddedCheckpoint(checkpoint, padded_sizes(checkpoint.config, group or GROUPS[0]))
    for key, size in found.sizes.items():
        logger.info("%s: %d is padded to %d with zeros", key, checkpoint.config[key], size)
    return found


def with_group(checkpoint: Checkpoint, options: QuantOptions) -> QuantOptions:
    """The options with a group for the automatic one: the largest usual one that divides every K."""
    if options.group:
        return options
    ks = [k for k, _n in _shapes(checkpoint).values()]
    found = next((group for group in GROUPS if all(k % group == 0 for k in ks)), 0)
    if not found:
        raise UsageError(
            f"--w-group-size: none of {', '.join(map(str, GROUPS))} divides every linear's K; "
            "give one that does"
        )
    return replace(options, group=found)


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """(K, N) of each kind of linear that some layer has."""
    arch, config = checkpoint.arch, checkpoint.config
    names = {name for index in range(arch.num_layers(config)) for name in arch.linears_of(config, index)}
    return {name: shape for name, shape in arch.linear_shapes(config).items() if name in names}


def _some(problems: list[str], most: int = 12) -> str:
    """A list of problems in one line, however many there are."""
    more = f" and {len(problems) - most} more" if len(problems) > most else ""
    return f"{', '.join(problems[:most])}{more}"


def check_work_dir(work_dir: Path, overwrite: bool) -> None:
    """Raise UsageError when --work-dir holds something this program did not write."""
    if work_dir.exists() and not work_dir.is_dir():
        raise UsageError(f"--work-dir {work_dir}: is a file, expected a directory to write")
    ours = (work_dir / MARKER).is_file()
    if work_dir.is_dir() and any(work_dir.iterdir()) and not ours and not overwrite:
        raise UsageError(
            f"--work-dir {work_dir}: not empty and not an earlier result; choose another or pass --overwrite"
        )


def check_finite(checkpoint: Checkpoint) -> None:
    """Read every weight once; raise CheckpointError naming the first with NaN or inf."""
    names = checkpoint.names()
    with console.progress("checking weights", len(names)) as task:
        for name in names:
            tensor = checkpoint.tensor(name)
            if tensor.is_floating_point() and not _all_finite(tensor):
                bad = int((~torch.isfinite(tensor)).sum())
                raise CheckpointError(
                    f"{checkpoint.path}: {name} holds {bad} NaN or inf values; "
                    "the file is damaged or the model diverged"
                )
            checkpoint.release()
            task.advance()


def _all_finite(tensor: Tensor) -> bool:
    """A sum in fp64 is finite exactly when all of it is. In pieces: the cast takes memory."""
    pieces = tensor.reshape(-1).split(FINITE_PIECE)
    return all(bool(torch.isfinite(piece.sum(dtype=torch.float64))) for piece in pieces)
