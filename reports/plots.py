"""The report's plots, as plotly figures without colours: the page paints them for light or dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from turbomill.reports.runs import Variant

SYMBOLS = {"16": "circle", "8": "square", "4": "diamond"}


@dataclass(frozen=True)
class Plot:
    """A figure with the words that stand for it."""

    id: str
    title: str
    caption: str
    alt: str
    spec: str  # JSON, safe inside <script>


def _spec(figure: go.Figure) -> str:
    document = json.loads(figure.to_json() or "{}")
    document["layout"].pop("template", None)
    return json.dumps(document).replace("<", "\\u003c")


def _figure(traces: list[go.Scatter], x: str, y: str) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(
        xaxis={"title": {"text": x}, "rangemode": "tozero", "automargin": True},
        yaxis={"title": {"text": y}, "rangemode": "tozero", "automargin": True},
        margin={"l": 56, "r": 24, "t": 16, "b": 48},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        height=380,
    )
    return figure


def _label_sides(heights: Sequence[float]) -> list[str]:
    """Labels of neighbours in height go to different sides, so that close points stay readable."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    return ["middle right" if order.index(i) % 2 else "middle left" for i in range(len(heights))]


def _alt(points: Sequence[tuple[str, float, float]], x: str, y: str) -> str:
    told = "; ".join(f"{name}: {x} {px:.4g}, {y} {py:.4g}" for name, px, py in points)
    return f"Scatter plot of {y} against {x}. {told}."


def _quality(variant: Variant) -> tuple[str, float]:
    return (
        ("KL to the reference", max(variant.kl, 0.0))
        if variant.kl is not None
        else ("perplexity", variant.ppl)
    )


def size_quality(variants: Sequence[Variant]) -> Plot | None:
    """Bytes on disk against KL (perplexity without a reference)."""
    if len(variants) < 2:
        return None
    kind = _quality(variants[0])[0]
    points = [(v.name, v.disk_bytes / 1e6, _quality(v)[1]) for v in variants]
    trace = go.Scatter(
        x=[x for _, x, _ in points],
        y=[y for _, _, y in points],
        text=[name for name, _, _ in points],
        mode="markers+text",
        textposition=_label_sides([y for _, _, y in points]),
        marker={"size": 12},
        cliponaxis=False,
        hovertemplate="%{text}: %{x:.1f} MB, " + kind + " %{y:.4f}<extra></extra>",
    )
    figure = _figure([trace], "size on disk (MB)", kind)
    caption = "Lower is closer to the reference, further left is smaller."
    return Plot("size-quality", "Size and quality", caption, _alt(points, "size in MB", kind), _spec(figure))


def quality_speed(variants: Sequence[Variant]) -> Plot | None:
    """Decode tokens/s against KL, one trace for each precision of the KV cache."""
    measured = [v for v in variants if v.decode_tok_s is not None]
    if len(measured) < 2:
        return None
    kind = _quality(measured[0])[0]
    traces, told = [], []
    for bits in dict.fromkeys(bits for v in measured for bits in v.kv):
        rows = [(v.name, v.kv[bits]) for v in measured if bits in v.kv]
        points = [
            (name, p.decode_tok_s or 0.0, max(p.kl, 0.0) if p.kl is not None else p.ppl) for name, p in rows
        ]
        told += [(f"{name} with KV {bits}", x, y) for name, x, y in points]
        traces.append(
            go.Scatter(
                x=[x for _, x, _ in points],
                y=[y for _, _, y in points],
                text=[name for name, _, _ in points],
                name=f"KV {bits}",
                # The unquantized cache's points carry the names; the others lie close to them.
                mode="markers" if traces else "markers+text",
                textposition=_label_sides([y for _, _, y in points]),
                marker={"size": 11, "symbol": SYMBOLS.get(bits, "circle")},
                cliponaxis=False,
                hovertemplate=f"%{{text}}, KV {bits}: %{{x:.1f}} tokens/s, {kind} %{{y:.4f}}<extra></extra>",
            )
        )
    figure = _figure(traces, "decode speed (tokens/s, one sequence)", kind)
    caption = "Lower is closer to the reference, further right is faster. The legend hides and shows."
    return Plot("quality-speed", "Quality and speed", caption, _alt(told, "tokens/s", kind), _spec(figure))


def rate_latency(loads: Sequence[dict[str, Any]], knee: float | None, number: int) -> Plot | None:
    """Time to first token against the rate of requests, and the knee; None with fewer than two rates.

    `number` keeps plots of several runs apart. What was sent at once has no rate, and is left out.
    """
    paced = [load for load in loads if load["request_rate"] != "inf" and load["median_ttft_ms"] is not None]
    if len(paced) < 2:
        return None
    rates = [float(load["request_rate"]) for load in paced]
    traces, told = [], []
    for name, field in (("median", "median_ttft_ms"), ("p99", "p99_ttft_ms")):
        values = [float(load[field]) for load in paced]
        told += [(f"{name} at {rate:.3g} requests/s", rate, y) for rate, y in zip(rates, values, strict=True)]
        hover = f"{name}: %{{y:.0f}} ms at %{{x:.2f}} requests/s<extra></extra>"
        traces.append(go.Scatter(x=rates, y=values, name=name, mode="lines+markers", hovertemplate=hover))
    alt = _alt(told, "requests/s", "ms")
    if knee is not None:
        top = max(y for _, _, y in told)
        hover = "knee: %{x:.2f} requests/s<extra></extra>"
        traces.append(go.Scatter(x=[knee, knee], y=[0, top], name="knee", mode="lines", hovertemplate=hover))
        alt += f" The knee is at {knee:.4g} requests/s."
    figure = _figure(traces, "requests/s", "time to first token (ms)")
    caption = "Right of the knee the objectives are missed. The legend hides and shows."
    return Plot(f"rate-latency-{number}", "Latency against rate", caption, alt, _spec(figure))
