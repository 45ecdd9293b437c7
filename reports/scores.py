"""The arithmetic of scoring: perplexity, KL divergence, top-1 and top-5 agreement, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from turbomill.errors import TurbomillError
from turbomill.reports.bootstrap import Counted, interval
from turbomill.reports.reference import Reference, likeliest, row_chunks
from turbomill.reports.runs import Score, WindowScores


class LogitsError(TurbomillError):
    """Logits that cannot be scored."""


@dataclass(frozen=True)
class WindowResult:
    """Each position of one window, fp64. Without a reference there is `nll` alone."""

    nll: NDArray[np.float64]  # [T - 1] of token t + 1
    kl: NDArray[np.float64] | None  # [T]
    top1: NDArray[np.float64] | None  # [T] 1 where the likeliest token is the same
    top5: NDArray[np.float64] | None  # [T] share of the reference's five that are among the five
    first: int = 0  # positions before are context only: the window before has scored them

    @property
    def scored_nll(self) -> NDArray[np.float64]:
        """Of the tokens from `first` on (the window's first token is predicted by nothing)."""
        return self.nll[max(self.first - 1, 0) :]

    def scored(self, name: str) -> NDArray[np.float64]:
        """`kl`, `top1` or `top5` of the positions from `first` on."""
        return getattr(self, name)[self.first :]


@dataclass
class Tally:
    """Adds up windows."""

    results: list[WindowResult] = field(default_factory=list)

    def score(self) -> Score:
        """Perplexity: exp of the mean over every predicted token. The others: means over every position.

        Intervals are of 95 %, by bootstrap over windows (turbomill.reports.bootstrap); None for one window.
        """
        nll = Counted.of([r.scored_nll for r in self.results])
        compared = all(r.kl is not None for r in self.results)
        means: dict[str, Counted | None] = {
            name: Counted.of([r.scored(name) for r in self.results]) if compared else None
            for name in ("kl", "top1", "top5")
        }
        bounds = interval(nll)
        kl = means["kl"]
        return Score(
            ppl=math.exp(nll.mean),
            ppl_ci=bounds and (math.exp(bounds[0]), math.exp(bounds[1])),
            kl_ci=kl and interval(kl),
            kl=kl and kl.mean,
            top1=means["top1"] and means["top1"].mean,
            top5=means["top5"] and means["top5"].mean,
            positions=sum(len(r.nll) + 1 - r.first for r in self.results),
            per_window=WindowScores(
                tokens=nll.counts.tolist(),
                nll=nll.means.tolist(),
                **{name: counted and counted.means.tolist() for name, counted in means.items()},
            ),
        )


def by_context(results: Sequence[WindowResult], edges: Sequence[int]) -> list[tuple[float, float | None]]:
    """Perplexity and KL of the positions with contexts of (0, e0], (e0, e1], ... tokens, over all windows.

    The token after t + 1 tokens is predicted at position t. Every position counts, whatever the stride.
    """
    found = []
    for low, high in zip((0, *edges), edges, strict=False):
        nll = np.concatenate([r.nll[low:high] for r in results])
        kls = [r.kl[low:high] for r in results if r.kl is not None]
        kl = float(np.concatenate(kls).mean()) if len(kls) == len(results) else None
        found.append((math.exp(nll.mean()), kl))
    return found


def worst(per_window: WindowScores, count: int = 3) -> Sequence[int]:
    """The windows with the largest KL, without a reference with the largest NLL, worst first."""
    values = per_window.kl if per_window.kl is not None else per_window.nll
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def check_logits(logits: NDArray[np.float32], index: int, model: str) -> None:
    """Raise LogitsError, naming the window and its first bad position, when logits [T, V] are not finite."""
    for rows in row_chunks(len(logits)):
        bad = ~np.isfinite(logits[rows]).all(axis=1)
        if bad.any():
            position = rows.start + int(bad.argmax())
            raise LogitsError(
                f"{model}: window {index}, position {position}: the logits hold NaN or inf; "
                "the quantized weights or the KV cache overflow (try a bf16 source, or --quant-policy 0)"
            )


def score_window(
    token_ids: NDArray[np.int64], logits: NDArray[np.float32], reference: Reference | None, first: int = 0
) -> WindowResult:
    """Score logits [T, V] of `token_ids` [T].

    NLL: -log q(token t+1 | tokens up to t), t = 0 .. T-2. KL: sum of p (log p - log q), reference p, all T.
    """
    targets = torch.from_numpy(token_ids[1:])
    nll, kl, top1, top5 = [], [], [], []
    for index, rows in enumerate(row_chunks(len(token_ids))):
        log_q = torch.log_softmax(torch.from_numpy(logits[rows]), -1)  # [t, V]
        wanted = targets[rows]
        nll.append(-log_q[: len(wanted)].gather(1, wanted[:, None])[:, 0].double().numpy())
        if reference is None:
            continue
        p = reference.probabilities(index)  # [t, V]
        kl.append((torch.xlogy(p, p) - p * log_q).sum(-1, dtype=torch.float64).numpy())
        ours, theirs = likeliest(logits[rows]), reference.top[rows]
        top1.append((ours[:, 0] == theirs[:, 0]).astype(np.float64))
        top5.append((theirs[:, :, None] == ours[:, None, :]).any(-1).mean(-1))
    if reference is None:
        return WindowResult(np.concatenate(nll), None, None, None, first)
    return WindowResult(*(np.concatenate(x) for x in (nll, kl, top1, top5)), first=first)
