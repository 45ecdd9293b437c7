"""`turbomill lite`: calibrate and quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from turbomill.commands import SETTINGS, DashGroup, options

if TYPE_CHECKING:
    from turbomill.quant.options import Method, QuantResult


@click.group(cls=DashGroup, context_settings=SETTINGS)
def lite() -> None:
    """Calibrate and quantize a model, one decoder layer at a time.

    MODEL is a local directory, a GGUF file, a hub name, or `demo`. Embeddings, norms and head stay as they
    are.
    """


OUTPUT = options(
    click.argument("model"),
    click.option(
        "--work-dir",
        required=True,
        type=click.Path(path_type=Path),
        help="Directory to write; it appears when it is complete.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace a --work-dir that holds something else."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."),
)
DEVICE = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Where calibration and the solvers run: cpu, cuda, cuda:1, ...; auto: the first GPU, if any.",
)


def calibration(dataset: str = "builtin", samples: int = 128, seqlen: int = 2048) -> Callable[[Any], Any]:
    """Options that say on what text; the defaults are LMDeploy's."""
    return options(
        click.option(
            "--calib-dataset",
            default=dataset,
            show_default=True,
            help="builtin, self or free (written by the model, after openings of the built-in text or after "
            "nothing), a .txt, .jsonl or .parquet file or folder, or "
            "wikitext2, c4, ptb, pileval, gsm8k, neuralmagic_calibration, open-platypus, openwebtext (hub). "
            "Several, joined by commas, share the samples.",
        ),
        click.option("--calib-samples", default=samples, show_default=True, help="Windows of text."),
        click.option("--calib-seqlen", default=seqlen, show_default=True, help="Tokens per window."),
        click.option(
            "--batch-size", default=0, show_default=True, help="Windows run together; 0: about 4,096 tokens."
        ),
        click.option("--seed", default=0, show_default=True, help="For --calib-dataset self and free."),
        click.option(
            "--spool/--no-spool",
            default=None,
            help="Keep the calibration activations on disk; by default when they need much of the free "
            "memory.",
        ),
        DEVICE,
    )


def scheme(group: int = 128) -> Callable[[Any], Any]:
    """Options that say how the weights are stored."""
    return options(
        click.option("--w-bits", default=4, show_default=True, help="Bits per weight."),
        click.option(
            "--w-group-size",
            default=group,
            show_default=True,
            help="Input channels that share a scale; 0: the largest of 128, 64, 32 that divides every K; "
            "-1: all of them.",
        ),
        click.option("--w-sym", "--sym", is_flag=True, help="Symmetric grids, without zeros."),
        click.option(
            "--pad",
            is_flag=True,
            help="Pad MLPs with zeros where the group does not divide their inner size.",
        ),
        click.option(
            "--format",
            type=click.Choice(["awq", "gptq", "gptq_v2", "compressed-tensors"]),
            help="Format of the checkpoint; by default awq for auto_awq, gptq for the others.",
        ),
        click.option(
            "--max-shard-size",
            default=5.0,
            show_default=True,
            help="Largest weight file, in GB of 10^9 bytes.",
        ),
    )


CORRECT = click.option(
    "--correct/--no-correct",
    default=True,
    show_default=True,
    help="Make up for what the quantized layers before it do to a layer's inputs (Li et al. 2025).",
)
DAMPING = click.option(
    "--damping", default=0.01, show_default=True, help="Share of the Hessian's mean diagonal added to it."
)


@lite.command()
@OUTPUT
@calibration()
def calibrate(model: str, work_dir: Path, as_json: bool, **given: Any) -> None:
    """Write input statistics of every linear, and K/V ranges per head channel."""
    from turbomill import console
    from turbomill.quant.calibrate import calibrate as run
    from turbomill.quant.options import QuantOptions

    console.setup_logging()
    result = run(model, work_dir, QuantOptions(**given))
    if as_json:
        console.emit_json(result.summary())
    else:
        console.stdout.print(
            f"{len(result.linears)} linears, {result.calibration['windows']} windows of "
            f"{result.calibration['length']} tokens, {result.seconds:.1f} s: {work_dir}"
        )


@lite.command()
@OUTPUT
@scheme()
@DEVICE
def rtn(model: str, work_dir: Path, as_json: bool, **given: Any) -> None:
    """Round to nearest. Needs no calibration."""
    _quantize(model, work_dir, "rtn", as_json, given)


@lite.command("auto_awq")
@OUTPUT
@calibration()
@scheme()
@CORRECT
@click.option(
    "--search-scale/--no-search-scale",
    default=True,
    show_default=True,
    help="Search how far to scale salient channels (Lin et al. 2023), or take the ratio 0.5.",
)
def auto_awq(model: str, work_dir: Path, as_json: bool, **given: Any) -> None:
    """Activation-aware scaling and clipping (Lin et al. 2023)."""
    _quantize(model, work_dir, "awq", as_json, given)


@lite.command("auto_gptq")
@OUTPUT
@calibration()
@scheme()
@CORRECT
@DAMPING
def auto_gptq(model: str, work_dir: Path, as_json: bool, **given: Any) -> None:
    """Second-order rounding (Frantar et al. 2022)."""
    _quantize(model, work_dir, "gptq", as_json, given)


@lite.command()
@OUTPUT
@calibration(dataset="builtin,free", samples=64, seqlen=512)
@scheme(group=0)
@DAMPING
@click.option(
    "--budget",
    default=0.0,
    help="Bits per weight, scales and zeros counted: mixed precision by measured sensitivity, "
    "written as compressed-tensors.",
)
def auto(model: str, work_dir: Path, as_json: bool, **given: Any) -> None:
    """The best recipe here: second-order rounding with drift correction and refinement.

    Half of the calibration text is the model's own, so that other kinds of text than the built-in one fare
    well too.
    """
    _quantize(model, work_dir, "auto", as_json, given)


def _quantize(model: str, work_dir: Path, method: Method, as_json: bool, given: dict[str, Any]) -> None:
    from turbomill import console
    from turbomill.quant.options import QuantOptions
    from turbomill.quant.run import quantize

    console.setup_logging()
    given = dict(given)
    options = QuantOptions(
        bits=given.pop("w_bits"),
        group=given.pop("w_group_size"),
        symmetric=given.pop("w_sym"),
        max_shard_bytes=int(given.pop("max_shard_size") * 1e9),
        format=given.pop("format") or "",
        **given,
    )
    result = quantize(model, work_dir, method, options)
    if as_json:
        console.emit_json(result.summary())
    else:
        console.stdout.print(_line(result), soft_wrap=True)


def _line(result: QuantResult) -> str:
    kept = f", {result.fallbacks} linears kept rounding to nearest" if result.fallbacks else ""
    return (
        f"{result.method} {result.scheme}: {len(result.rows)} linears, {result.disk_bytes / 1e6:.1f} MB, "
        f"{result.seconds:.1f} s, peak {result.peak_bytes / 1e6:.0f} MB{kept}: {result.work_dir}"
    )
