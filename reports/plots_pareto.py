"""Variants against one another: size and quality, quality and speed, each with its Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from turbomill.reports.plots import Plot, View, front, front_trace, label_sides, spec, told, trace
from turbomill.reports.runs import Variant

SYMBOLS = {"16": "circle", "8": "square", "4": "diamond"}


def _quality(variant: Variant) -> tuple[str, float]:
    return (
        ("KL to the reference", max(variant.kl, 0.0))
        if variant.kl is not None
        else ("perplexity", variant.ppl)
    )


def _alt(points: Sequence[tuple[str, float, float]], x: str, y: str, more_x_is_good: bool) -> str:
    best = ", ".join(name for name, _, _ in front(points, more_x_is_good))
    return f"Scatter plot of {y} against {x}. {told(points, x, y)}. No variant beats: {best}."


def size_quality(variants: Sequence[Variant]) -> Plot | None:
    """Bytes on disk against KL (perplexity without a reference)."""
    if len(variants) < 2:
        return None
    kind = _quality(variants[0])[0]
    points = [(v.name, v.disk_bytes / 1e6, _quality(v)[1]) for v in variants]
    shown = trace(
        0,
        x=[x for _, x, _ in points],
        y=[y for _, _, y in points],
        text=[name for name, _, _ in points],
        name="variants",
        mode="markers+text",
        textposition=label_sides([y for _, _, y in points]),
        marker={"size": 12},
        hovertemplate="%{text}: %{x:.1f} MB, " + kind + " %{y:.4f}<extra></extra>",
    )
    figure = spec([shown, front_trace(points, 1, False)], "size on disk (MB)", [View(kind, kind)])
    caption = (
        "Lower is closer to the reference, further left is smaller. Off the front, another is better in both."
    )
    return Plot("size-quality", "Size and quality", caption, _alt(points, "size in MB", kind, False), figure)


def quality_speed(variants: Sequence[Variant]) -> Plot | None:
    """Decode tokens/s against KL, one series for each precision of the KV cache."""
    measured = [v for v in variants if v.decode_tok_s is not None]
    if len(measured) < 2:
        return None
    kind = _quality(measured[0])[0]
    traces, points = [], []
    bits_of = list(dict.fromkeys(bits for v in measured for bits in v.kv)) or [None]
    for number, bits in enumerate(bits_of):
        if bits is None:
            named = [(v.name, v.decode_tok_s or 0.0, _quality(v)[1]) for v in measured]
        else:
            rows = [(v.name, v.kv[bits]) for v in measured if bits in v.kv]
            named = [
                (name, p.decode_tok_s or 0.0, max(p.kl, 0.0) if p.kl is not None else p.ppl)
                for name, p in rows
            ]
        label = "" if bits is None else f", KV {bits}"
        points += [(name + (f" with KV {bits}" if bits else ""), x, y) for name, x, y in named]
        traces.append(
            trace(
                number,
                x=[x for _, x, _ in named],
                y=[y for _, _, y in named],
                text=[name for name, _, _ in named],
                name="variants" if bits is None else f"KV {bits}",
                # The unquantized cache's points carry the names; the others lie close to them.
                mode="markers" if traces else "markers+text",
                textposition=label_sides([y for _, _, y in named]),
                marker={"size": 11, "symbol": SYMBOLS.get(bits or "16", "circle")},
                hovertemplate=f"%{{text}}{label}: %{{x:.1f}} tokens/s, {kind} %{{y:.4f}}<extra></extra>",
            )
        )
    traces.append(front_trace(points, len(traces), True))
    figure = spec(traces, "decode speed (tokens/s, one sequence)", [View(kind, kind)])
    caption = "Lower is closer to the reference, further right is faster. The buttons hide and show."
    return Plot("quality-speed", "Quality and speed", caption, _alt(points, "tokens/s", kind, True), figure)
