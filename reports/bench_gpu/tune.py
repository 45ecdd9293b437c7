"""`make tune-gpu`: time the plans of the fused kernels, and write the fastest into their table.

The table is compiled in: build again afterwards (the Makefile does).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import re
from pathlib import Path

from turbomill import _core
from turbomill.reports.bench_gpu.kernels import ROWS, SHAPES, check_bytes, check_linear

TABLE = Path("csrc/kernels/cuda/fused_plans_sm90a.inc")
# {bits, n, k, rows, overlap, {{warpgroups, tokens, blocks}, splits}},  // microseconds
ENTRY = re.compile(r"\{(\d+), (\d+), (\d+), (\d+), (true|false), \{\{\d+, \d+, \d+\}, \d+\}\}")
MOST_SPLITS = 8
HALVED = 7  # warpgroups of which two thread blocks have the rows (fused_plan.h); their K is not split
MOST_OVERLAPPING = 1024  # rows; above, launches do not overlap

Key = tuple[int, bool, int, int, int]  # bits, overlap, n, k, rows
Plan = tuple[int, int, int, int]  # warpgroups, tokens, blocks, splits


def candidates(bits: int, n: int, k: int, rows: int, multiprocessors: int) -> list[Plan]:
    """Plans worth timing: tiles of tokens that fit the rows, and splits of K that fill the GPU once."""
    plans = []
    for warpgroups, tokens, blocks in _core.kernels_cuda.fused_kernels(bits):
        if tokens >= 2 * max(rows, 8) or (tokens < min(rows, 64)) or (tokens == 64 and rows > 512):
            continue
        if warpgroups == HALVED:
            plans.append((warpgroups, tokens, blocks, 1))
            continue
        tiles = -(-n // (64 * warpgroups)) * -(-rows // tokens)
        most = min(MOST_SPLITS, -(-k // 128), max(1, multiprocessors * blocks // tiles))
        least = min(most, -(-multiprocessors // (2 * tiles)))
        plans += [(warpgroups, tokens, blocks, splits) for splits in range(least, most + 1)]
    return plans


def read_table(path: Path) -> dict[Key, str]:
    """The entries' lines; none when there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [(ENTRY.search(line), line) for line in lines]
    return {(int(m[1]), m[5] == "true", int(m[2]), int(m[3]), int(m[4])): line for m, line in found if m}


def write_table(path: Path, entries: dict[Key, str], device: str) -> None:
    """The whole table, in the order in which it is searched."""
    head = (
        f"// Plans timed on {device}, {datetime.date.today().isoformat()}: "
        "{bits, n, k, rows, overlap, {{warpgroups, tokens, blocks}, splits}}."
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("\n".join([head, *(entries[key] for key in sorted(entries))]) + "\n")
    partial.replace(path)


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(prog="tune-gpu", description=__doc__)
    shapes = ",".join(f"{n}x{k}" for n, k in SHAPES)
    parser.add_argument("--bits", default="4,8", help="of the weights, by commas")
    parser.add_argument("--shapes", default=shapes, help="NxK of weights, by commas")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of activations, by commas")
    parser.add_argument("--dtype", default="float16", help="of activations")
    parser.add_argument("--group", type=int, default=128, help="of the weights' scales")
    parser.add_argument("--repeats", type=int, default=7, help="graph replays a median is of")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table; entries not timed are kept")
    arguments = parser.parse_args()
    gpus = _core.cuda_devices() if "cuda" in _core.build_info()["backends"] else []
    if not gpus or not _core.kernels_cuda.w4_fused_runs():
        raise SystemExit("tune-gpu: needs a GPU of capability 9.0 and a build with machine code for 90a")
    check_linear(arguments.dtype)
    check_bytes(arguments.dtype)
    entries = read_table(arguments.table)
    multiprocessors = _core.kernels_cuda.multiprocessors()
    sizes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    # Few rows first: what many rows do to the GPU's clock slows what comes after them.
    every_rows = sorted(map(int, arguments.rows.split(",")))
    widths = [int(bits) for bits in arguments.bits.split(",")]
    for rows, bits, (n, k), overlap in itertools.product(every_rows, widths, sizes, (False, True)):
        if overlap and rows > MOST_OVERLAPPING:
            continue
        plans = candidates(bits, n, k, rows, multiprocessors)
        times = _core.kernels_cuda.bench_plans(
            bits, n, k, rows, arguments.group, arguments.dtype, plans, overlap, arguments.repeats
        )
        us, (warpgroups, tokens, blocks, splits) = min(zip(times, plans, strict=True))
        plan = f"{{{{{warpgroups}, {tokens}, {blocks}}}, {splits}}}"
        line = f"{{{bits}, {n}, {k}, {rows}, {str(overlap).lower()}, {plan}}},  // {us:.1f} us"
        entries[bits, overlap, n, k, rows] = line
        print(line, flush=True)
    write_table(arguments.table, entries, gpus[0]["name"])


if __name__ == "__main__":
    main()
