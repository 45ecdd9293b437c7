"""Figures that follow something: context length, request rate, layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turbomill.reports.plots import Plot, View, spec, told, trace
from turbomill.reports.runs import KvPolicy, LayerResult

LATENCIES = (
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("e2el", "end-to-end latency"),
)
LENGTH_VIEWS = (
    ("kl", View("KL", "KL to the unquantized cache")),
    ("ppl", View("Perplexity", "perplexity")),
    ("passkey", View("Passkey", "passkeys found (share)")),
    ("copied", View("Copying", "lines copied exactly (share)")),
)
LAYER_VIEWS = (
    ("loss", View("Loss", "loss of the output", log=True)),
    ("rtn_loss", View("If rounded", "loss if rounded to nearest", log=True)),
    ("weight_error", View("Weight error", "error of the weight", log=True)),
)


def kv_by_length(policies: Sequence[KvPolicy], name: str, number: int) -> Plot | None:
    """Each KV policy's KL, perplexity and accuracies by context length; None for a single length."""
    if all(len(policy.by_length) < 2 for policy in policies):
        return None
    traces, views, words = [], [], []
    for field, view in LENGTH_VIEWS:
        found = []
        for series, policy in enumerate(policies):
            known = [(at.tokens, getattr(at, field)) for at in policy.by_length]
            known = [(tokens, value) for tokens, value in known if value is not None]
            if known:
                found.append((series, policy.name, known))
        if not found:
            continue
        for series, bits, known in found:
            hover = f"KV {bits}: {view.y} %{{y:.4f}} at %{{x}} tokens<extra></extra>"
            x, y = [tokens for tokens, _ in known], [max(value, 0.0) for _, value in known]
            traces.append(
                trace(
                    *(series, len(views)),
                    x=x,
                    y=y,
                    name=f"KV {bits}",
                    mode="lines+markers",
                    hovertemplate=hover,
                )
            )
            words.append(f"{view.y} of KV {bits}: " + ", ".join(f"{v:.4g} at {t}" for t, v in known))
        views.append(view)
    caption = "How the quantized cache holds as the context grows. The buttons hide and show."
    alt = f"Lines over the context length in tokens. {'; '.join(words)}."
    title = f"KV cache of {name} by context length"
    return Plot(f"kv-length-{number}", title, caption, alt, spec(traces, "context (tokens)", views))


def rate_latency(loads: Sequence[dict[str, Any]], knee: float | None, number: int) -> Plot | None:
    """Latencies against the rate of requests, and the knee; None with fewer than two rates.

    `number` keeps plots of several runs apart. What was sent at once has no rate, and is left out.
    """
    paced = [load for load in loads if load["request_rate"] != "inf" and load["median_ttft_ms"] is not None]
    if len(paced) < 2:
        return None
    traces, views, words = [], [], []
    for metric, what in LATENCIES:
        with_it = [load for load in paced if load.get(f"median_{metric}_ms") is not None]
        if not with_it:
            continue
        rates = [float(load["request_rate"]) for load in with_it]
        points: list[tuple[str, float, float]] = []
        for series, name in enumerate(("median", "p99")):
            values = [float(load[f"{name}_{metric}_ms"]) for load in with_it]
            points += [(name, rate, y) for rate, y in zip(rates, values, strict=True)]
            hover = f"{name}: %{{y:.0f}} ms at %{{x:.2f}} requests/s<extra></extra>"
            traces.append(
                trace(
                    *(series, len(views)),
                    x=rates,
                    y=values,
                    name=name,
                    mode="lines+markers",
                    hovertemplate=hover,
                )
            )
        if knee is not None:
            top = max(y for _, _, y in points)
            hover = "knee: %{x:.2f} requests/s<extra></extra>"
            line = {"x": [knee, knee], "y": [0, top], "name": "knee", "mode": "lines", "hovertemplate": hover}
            traces.append(trace(2, len(views), line={"dash": "dash"}, **line))
        words.append(f"{what}: {told(points, 'requests/s', 'ms')}")
        views.append(View(metric.upper(), f"{what} (ms)"))
    alt = f"Lines of latencies against the rate. {'. '.join(words)}."
    if knee is not None:
        alt += f" The knee is at {knee:.4g} requests/s."
    caption = "Right of the knee the objectives are missed. The buttons hide and show."
    return Plot(
        f"rate-latency-{number}", "Latency against rate", caption, alt, spec(traces, "requests/s", views)
    )


def layer_loss(layers: Sequence[LayerResult], name: str, number: int) -> Plot | None:
    """Every linear's loss by layer; None for a single layer. Experts are left to the table."""
    kinds = list(dict.fromkeys(row.linear for row in layers if "experts" not in row.linear))
    if len({row.layer for row in layers}) < 2 or not kinds:
        return None
    traces, views, words = [], [], []
    for field, view in LAYER_VIEWS:
        found = []
        for series, kind in enumerate(kinds):
            known = [(row.layer, getattr(row, field)) for row in layers if row.linear == kind]
            known = [(layer, value) for layer, value in known if value]  # of 0 there is no logarithm
            if known:
                found.append((series, kind, known))
        if not found:
            continue
        for series, kind, known in found:
            hover = f"{kind}, layer %{{x}}: %{{y:.2e}}<extra></extra>"
            x, y = [layer for layer, _ in known], [value for _, value in known]
            traces.append(
                trace(
                    *(series, len(views)),
                    x=x,
                    y=y,
                    name=kind,
                    mode="lines+markers",
                    hovertemplate=hover,
                )
            )
            worst = max(known, key=lambda at: at[1])
            words.append(f"{view.y}, {kind}: at most {worst[1]:.2g}, in layer {worst[0]}")
        views.append(view)
    alt = f"Lines over the layers. {'; '.join(words)}."
    caption = "Relative to the output's, or weight's, own square; logarithmic. The buttons hide and show."
    return Plot(f"layer-loss-{number}", f"Loss by layer, {name}", caption, alt, spec(traces, "layer", views))
