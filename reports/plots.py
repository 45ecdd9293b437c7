"""What the report's plots share: plotly figures without colours, which the page paints for light or dark.

Every trace says in `meta` which series it belongs to, and which view: a plot with several views shows one at
a time. The page makes its own controls of series and views, which a keyboard reaches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

FRONT = "Pareto front"


@dataclass(frozen=True)
class Plot:
    """A figure with the words that stand for it."""

    id: str
    title: str
    caption: str
    alt: str
    spec: str  # JSON, safe inside <script>


@dataclass(frozen=True)
class View:
    """One of a plot's y axes."""

    name: str
    y: str  # the axis's title
    log: bool = False


def trace(series: int, view: int = 0, **given: Any) -> go.Scatter:
    """Points or a line of `series`, which gives its colour."""
    return go.Scatter(meta={"series": series, "view": view}, cliponaxis=False, **given)


def spec(traces: Sequence[go.Scatter], x: str, views: Sequence[View]) -> str:
    """The figure as JSON, with its views."""
    figure = go.Figure(list(traces))
    figure.update_layout(
        xaxis={"title": {"text": x}, "rangemode": "tozero", "automargin": True},
        yaxis={"title": {"text": views[0].y}, "rangemode": "tozero", "automargin": True},
        margin={"l": 56, "r": 24, "t": 16, "b": 48},
        showlegend=False,
        height=380,
    )
    document = json.loads(figure.to_json() or "{}")
    document["layout"].pop("template", None)
    document["views"] = [vars(view) for view in views]
    return json.dumps(document).replace("<", "\\u003c")


def label_sides(heights: Sequence[float]) -> list[str]:
    """Labels of neighbours in height go to different sides, so that close points stay readable."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    return ["middle right" if order.index(i) % 2 else "middle left" for i in range(len(heights))]


def told(points: Iterable[tuple[str, float, float]], x: str, y: str) -> str:
    """The points in words."""
    return "; ".join(f"{name}: {x} {px:.4g}, {y} {py:.4g}" for name, px, py in points)


def front(points: Sequence[tuple[str, float, float]], more_x_is_good: bool) -> list[tuple[str, float, float]]:
    """The points that no other one beats in both, with y low, by x: what is worth choosing from."""
    sign = -1 if more_x_is_good else 1
    best: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda p: (sign * p[1], p[2])):
        if not best or point[2] < best[-1][2]:
            best.append(point)
    return sorted(best, key=lambda p: p[1])


def front_trace(points: Sequence[tuple[str, float, float]], series: int, more_x_is_good: bool) -> go.Scatter:
    """The Pareto front as a dashed line."""
    best = front(points, more_x_is_good)
    return trace(
        series,
        x=[x for _, x, _ in best],
        y=[y for _, _, y in best],
        name=FRONT,
        mode="lines",
        line={"dash": "dot", "width": 1.5},
        hoverinfo="skip",
    )
