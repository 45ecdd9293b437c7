"""Everything that can be known to fail is found here, before any calibration."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from turbomill import console
from turbomill.calib_data import check_name
from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.store.check import IGNORED
from turbomill.errors import CheckpointError, UsageError
from turbomill.quant.export import check_bits, export_format, format_name
from turbomill.quant.options import Method, QuantOptions

logger = logging.getLogger("turbomill.quant")

MARKER = "turbomill.json"
GROUPS = (128, 64, 32)


def check_run(checkpoint: Checkpoint, work_dir: Path, method: Method, options: QuantOptions) -> None:
    """Raise for options this model or format cannot take, an unknown data set, or a work dir that is not
    ours."""
    check_dense(checkpoint)
    name = format_name(options.format, method)
    check_bits(name, options.bits)
    check_shapes(checkpoint, export_format(name, options.scheme, checkpoint), options)
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
    arch, config = checkpoint.arch, checkpoint.config
    names = {name for index in range(arch.num_layers(config)) for name in arch.linears_of(config, index)}
    shapes = {name: shape for name, shape in arch.linear_shapes(config).items() if name in names}
    ragged = [f"{name} K={k}" for name, (k, _n) in shapes.items() if k % options.group]
    if ragged:
        works = [str(g) for g in GROUPS if all(k % g == 0 for k, _n in shapes.values())]
        raise UsageError(
            f"--w-group-size {options.group}: does not divide {_some(ragged)}; "
            f"for this model {'use ' + ' or '.join(works) if works else 'no group of 128, 64 or 32 works'}"
        )
    uneven = [f"{name}: {wrong}" for name, (k, n) in shapes.items() if (wrong := form.misfit(name, k, n))]
    if uneven:
        raise UsageError(f"--format {form.name}: {_some(uneven)}; use --format compressed-tensors")


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
            # A sum in fp64 is finite exactly when all of it is: no mask to allocate.
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
                bad = int((~torch.isfinite(tensor)).sum())
                raise CheckpointError(
                    f"{checkpoint.path}: {name} holds {bad} NaN or inf values; "
                    "the file is damaged or the model diverged"
                )
            task.advance()
