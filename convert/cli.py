"""The commands `convert` and `inspect`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import rich_click as click

from turbomill import console


@click.command()
@click.argument("model")
@click.argument("dst", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--dst-path",
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory to write, which does not exist yet; may also be given after MODEL.",
)
@click.option(
    "--to",
    "target",
    type=click.Choice(["store", "hf", "awq", "gptq", "gptq_v2", "compressed-tensors"]),
    default="store",
    show_default=True,
    help="Write a store, or a checkpoint in this format (hf: dense); then MODEL may be a store too.",
)
@click.option(
    "--pad-tp",
    type=click.Choice(["1", "2", "4", "8"]),
    default="1",
    show_default=True,
    help="Pad MLPs with zeros where a store would not split over so many tensor parallel ranks.",
)
@click.option(
    "--force", is_flag=True, help="Replace an existing store, or a checkpoint that turbomill wrote."
)
@click.option("--dense", is_flag=True, help="Store a GGUF file's 4-bit linears in 16 bits.")
@click.option("--allow-pickle", is_flag=True, help="Read pytorch_model.bin where there are no safetensors.")
@click.option("--json", "as_json", is_flag=True, help="Print machine output on stdout.")
def convert(
    model: str,
    dst: Path | None,
    dst_path: Path | None,
    target: str,
    force: bool,
    dense: bool,
    pad_tp: str,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to a fused model store, or a store back to a checkpoint.

    MODEL is a Hugging Face directory (dense, fp8 in blocks, AWQ gemm, GPTQ or compressed-tensors), a GGUF
    file, a hub name, or `demo`; with --to also a store.
    """
    console.setup_logging()
    from turbomill.convert.describe import describe

    where = dst_path or dst
    if where is None or (dst and dst_path and dst != dst_path):
        raise click.UsageError("Give the directory to write once, as --dst-path DIR or after MODEL.")
    if target == "store":
        from turbomill.convert.store import convert_checkpoint

        convert_checkpoint(
            model, where, force=force, dense=dense, allow_pickle=allow_pickle, pad_tp=int(pad_tp)
        )
    else:
        from turbomill.convert.rewrite import rewrite

        rewrite(model, where, target, force=force)  # type: ignore[arg-type]
    described = describe(where)
    if as_json:
        console.emit_json(described.to_dict())
    else:
        console.stderr.print(described.render(tensors=False))


@click.command()
@click.argument("path", metavar="MODEL", required=False)
@click.option("--architectures", is_flag=True, help="List the supported architectures instead.")
@click.option("--tensors/--no-tensors", default=True, show_default=True, help="List every tensor.")
@click.option("--verify", is_flag=True, help="Read a store's files and compare their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print machine output on stdout.")
def inspect(path: str | None, architectures: bool, tensors: bool, verify: bool, as_json: bool) -> None:
    """Show what a checkpoint, a GGUF file or a store holds."""
    console.setup_logging()
    if architectures:
        _list_architectures(as_json)
        return
    if path is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    from turbomill.convert.describe import describe
    from turbomill.convert.source import resolve_model

    found = describe(resolve_model(path), verify=verify)
    if as_json:
        console.emit_json(found.to_dict())
    else:
        console.stdout.print(found.render(tensors=tensors))


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON on stdout.")
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two models, each a checkpoint or a store: sizes, and every weight as what it stands for.

    The exit code is 1 when they differ.
    """
    console.setup_logging()
    from rich.table import Table

    from turbomill.convert.diff import diff as run

    found = run(a, b)
    if as_json:
        console.emit_json({**asdict(found), "same": found.same})
    else:
        for key, (one, other) in found.sizes.items():
            console.stdout.print(f"{key}: {one} and {other}")
        if found.tensors:
            table = Table("tensor", "A", "B", "largest difference", "relative error")
            for line in sorted(found.tensors, key=lambda line: -(line.relative or float("inf"))):
                numbers = (f"{n:.3g}" if n is not None else "" for n in (line.largest, line.relative))
                table.add_row(line.name, line.a, line.b, *numbers)
            console.stdout.print(table)
        console.stdout.print(f"{len(found.tensors)} tensors differ, {found.equal} are equal")
    if not found.same:
        sys.exit(1)


def _list_architectures(as_json: bool) -> None:
    from turbomill.convert.models.base import architecture_table, architectures

    if as_json:
        console.emit_json({arch.name: arch.models for arch in architectures()})
    else:
        click.echo(architecture_table())
