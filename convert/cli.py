"""The commands `convert` and `inspect`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import rich_click as click

from turbomill import console


@click.command()
@click.argument("model")
@click.option(
    "--dst-path",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The store to write, a directory that does not exist yet.",
)
@click.option("--force", is_flag=True, help="Replace an existing store.")
@click.option("--dense", is_flag=True, help="Store a GGUF file's 4-bit linears in 16 bits.")
@click.option("--allow-pickle", is_flag=True, help="Read pytorch_model.bin where there are no safetensors.")
@click.option("--json", "as_json", is_flag=True, help="Print machine output on stdout.")
def convert(model: str, dst_path: Path, force: bool, dense: bool, allow_pickle: bool, as_json: bool) -> None:
    """Convert a checkpoint to a fused model store.

    MODEL is a Hugging Face directory (dense, fp8 in blocks, AWQ gemm, GPTQ or compressed-tensors), a GGUF
    file, a hub name, or `demo`.
    """
    console.setup_logging()
    from turbomill.convert.describe import describe_store
    from turbomill.convert.store import convert_checkpoint

    store = convert_checkpoint(model, dst_path, force=force, dense=dense, allow_pickle=allow_pickle)
    if as_json:
        console.emit_json(describe_store(store).to_dict())
    else:
        console.stderr.print(describe_store(store).render(tensors=False))


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
