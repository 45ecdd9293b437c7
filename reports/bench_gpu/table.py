"""The results as plain text, each beside its floor and the peers' figures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turbomill.engine.kv_scheme import KvScheme

PEERS = json.loads(Path(__file__).with_name("peers_h200.json").read_text())


def render(results: dict[str, Any]) -> str:
    """Every section of the results that is there."""
    lines = [f"{results['device']}, {results['date']}; peers measured {PEERS['date']} on {PEERS['device']}"]
    if "copy_bytes_per_second" in results:
        lines.append(f"device-to-device copy: {results['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    for title, section in (
        ("4-bit linears, group 128, us, sum over the four shapes of a Llama-3-8B layer", _linears),
        ("8-bit linears, likewise", _linears8),
        ("16-bit linears, likewise", _linears16),
        ("experts of a layer, bfloat16, us", _experts),
        ("decode attention, us a layer", _decodes),
        ("prompt attention, 4096 tokens, us a layer", _prompts),
        ("Llama-3-8B shape, tokens/s", _end_to_end),
    ):
        rows = list(section(results))
        if len(rows) > 1:
            lines += ["", title, *_aligned(rows)]
    return "\n".join(lines)


def _aligned(rows: list[list[Any]]) -> list[str]:
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.1f}" if cell < 1000 else f"{cell:,.0f}"
    return str(cell)


def _sums(rows: Iterable[dict[str, Any]], key: str = "us") -> dict[int, float]:
    sums: dict[int, float] = {}
    for row in rows:
        sums[row["M"]] = sums.get(row["M"], 0.0) + row[key]
    return sums


def _linears(results: dict[str, Any], section: str = "linears") -> Iterable[list[Any]]:
    ours = results.get(section, {})
    first = next(iter(ours.values()), [])
    columns = list(_sums(first))
    yield ["M", *columns]
    if not ours:
        return
    floors = _sums(first, "floor_us")
    yield ["floor", *(floors[m] for m in columns)]
    for dtype, rows in ours.items():
        sums = _sums(rows)
        yield [f"turbomill {dtype}", *(sums[m] for m in columns)]
    peers = PEERS["w4a16_g128_gemm"]["rows"] if section == "linears" else []
    for kernel in sorted({row["kernel"] for row in peers}):
        mine = [row for row in peers if row["kernel"] == kernel]
        sums = _sums(mine)
        whole = {m for m in columns if sum(row["M"] == m for row in mine) == 4}
        yield [kernel, *(sums[m] if m in whole else None for m in columns)]


def _linears8(results: dict[str, Any]) -> Iterable[list[Any]]:
    return _linears(results, "linears8")


def _linears16(results: dict[str, Any]) -> Iterable[list[Any]]:
    return _linears(results, "linears16")


def _experts(results: dict[str, Any]) -> Iterable[list[Any]]:
    ours = results.get("experts", [])
    columns = list(dict.fromkeys(row["M"] for row in ours))
    yield ["M", *columns]
    for key in dict.fromkeys((row["model"], row["weights"]) for row in ours):
        mine = [row for row in ours if (row["model"], row["weights"]) == key]
        yield [" ".join(key), *(row["us"] for row in mine)]
        yield ["  floor", *(row["floor_us"] for row in mine)]


def _cache_name(row: dict[str, Any]) -> str:
    scheme = KvScheme(row["quant_policy"], row.get("rotation", False))
    return f"KV {scheme.describe()}"


def _decodes(results: dict[str, Any]) -> Iterable[list[Any]]:
    ours = results.get("decodes", [])
    sizes = list(dict.fromkeys((row["batch"], row["context"]) for row in ours))
    yield ["batch x context", *(f"{b} x {c}" for b, c in sizes)]
    for name in dict.fromkeys(_cache_name(row) for row in ours):
        mine = {(r["batch"], r["context"]): r for r in ours if _cache_name(r) == name}
        yield [f"floor {name}", *(mine[size]["floor_us"] for size in sizes)]
        yield [f"turbomill {name}", *(mine[size]["us"] for size in sizes)]
    if not ours:
        return
    peers = PEERS["decode_attention"]["rows"]
    for kernel in dict.fromkeys(row["kernel"] for row in peers):
        times = {(r["batch"], r["context"]): r["us"] for r in peers if r["kernel"] == kernel}
        yield [kernel, *(times.get(size) for size in sizes)]


def _prompts(results: dict[str, Any]) -> Iterable[list[Any]]:
    yield ["", "floor", "us"]
    for row in results.get("prompts", []):
        yield [f"turbomill {_cache_name(row)}", row["floor_us"], row["us"]]


def _end_to_end(results: dict[str, Any]) -> Iterable[list[Any]]:
    streams = ("b16", "b64", "b256")
    yield ["", "one stream", *streams, "prefill", "offline req/s", "offline out"]
    for run in (*results.get("end_to_end", []), *PEERS["end_to_end"]["rows"]):
        yield [
            run["run"],
            run.get("single_stream_decode_tok_s"),
            *(run.get(key, {}).get("out_tok_s") for key in streams),
            run.get("prefill", {}).get("prompt_tok_s"),
            run.get("offline", {}).get("req_s"),
            run.get("offline", {}).get("out_tok_s"),
        ]
