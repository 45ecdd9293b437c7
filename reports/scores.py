"""The arithmetic of scoring: perplexity, KL divergence and top-1 agreement from logits, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbomill.errors import TurbomillError
from turbomill.reports.runs import Score, WindowScores

# Rows of [*, V] at a time: about 25 MB of fp32 for a vocabulary of 50,000.
ROWS = 128


class LogitsError(TurbomillError):
    """Logits that cannot be scored."""


@dataclass(frozen=True)
class Reference:
    """What the reference said about one window."""

    log_probs: NDArray[np.uint16]  # codes [T, V]: log p = (code - 65535) * step + top
    step: NDArray[np.float32]  # [T]
    top: NDArray[np.float32]  # [T] log p of the likeliest token
    argmax: NDArray[np.int32]  # [T]

    def rows(self, rows: slice) -> Tensor:
        """log p of some positions [t, V], normalised, fp32."""
        codes = torch.from_numpy(self.log_probs[rows].astype(np.float32))
        step, top = (torch.from_numpy(x[rows])[:, None] for x in (self.step, self.top))
        # Rounded probabilities do not quite add up to 1; normalising leaves an error of second order only.
        return torch.log_softmax((codes - 65535) * step + top, -1)


@dataclass(frozen=True)
class WindowResult:
    """Sums over one window."""

    nll: float  # over the `tokens` - 1 predicted tokens
    kl: float | None  # over all `tokens` positions
    top1: int | None
    tokens: int


@dataclass
class Tally:
    """Adds up windows."""

    results: list[WindowResult] = field(default_factory=list)

    def score(self) -> Score:
        """Perplexity: exp of the mean over every predicted token. KL, top-1: means over every position."""
        predicted = sum(r.tokens - 1 for r in self.results)
        positions = sum(r.tokens for r in self.results)
        kls = [r.kl for r in self.results if r.kl is not None]
        tops = [r.top1 for r in self.results if r.top1 is not None]
        compared = len(kls) == len(self.results)
        return Score(
            ppl=math.exp(sum(r.nll for r in self.results) / predicted),
            kl=sum(kls) / positions if compared else None,
            top1=sum(tops) / positions if compared else None,
            positions=positions,
            per_window=WindowScores(
                nll=[r.nll / (r.tokens - 1) for r in self.results],
                kl=[(r.kl or 0.0) / r.tokens for r in self.results] if compared else None,
                top1=[(r.top1 or 0) / r.tokens for r in self.results] if compared else None,
            ),
        )


def _chunks(length: int) -> Iterator[slice]:
    for start in range(0, length, ROWS):
        yield slice(start, min(start + ROWS, length))


def check_logits(logits: NDArray[np.float32], index: int, model: str) -> None:
    """Raise LogitsError, naming the window and its first bad position, when logits [T, V] are not finite."""
    for rows in _chunks(len(logits)):
        bad = ~np.isfinite(logits[rows]).all(axis=1)
        if bad.any():
            position = rows.start + int(bad.argmax())
            raise LogitsError(
                f"{model}: window {index}, position {position}: the logits hold NaN or inf; "
                "the quantized weights or the KV cache overflow (try a bf16 source, or --quant-policy 0)"
            )


def make_reference(logits: NDArray[np.float32]) -> Reference:
    """Keep logits [T, V] in 16 bits per entry, evenly spaced between each row's extremes.

    The spacing is below 0.001 for any model: KL against the result is off by about step^2 / 24, 1e-7 at most.
    """
    count, vocab = logits.shape
    codes = np.empty((count, vocab), np.uint16)
    step, top = np.empty(count, np.float32), np.empty(count, np.float32)
    argmax = logits.argmax(axis=1).astype(np.int32)
    for rows in _chunks(count):
        log_p = torch.log_softmax(torch.from_numpy(logits[rows]), -1)  # [t, V]
        high = log_p.amax(-1, keepdim=True)
        unit = ((high - log_p.amin(-1, keepdim=True)) / 65535).clamp_min(1e-12)
        codes[rows] = (65535 + (log_p - high) / unit).round_().clamp_(0, 65535).to(torch.int32).numpy()
        step[rows], top[rows] = unit[:, 0].numpy(), high[:, 0].numpy()
    return Reference(codes, step, top, argmax)


def score_window(
    token_ids: NDArray[np.int64], logits: NDArray[np.float32], reference: Reference | None
) -> WindowResult:
    """Score logits [T, V] of `token_ids` [T]; sums are fp64.

    NLL: -log q(token t+1 | tokens up to t), t = 0 .. T-2. KL: sum of p (log p - log q), reference p, all T.
    """
    length = len(token_ids)
    targets = torch.from_numpy(token_ids[1:])
    nll, kl, agree = 0.0, 0.0, 0
    for rows in _chunks(length):
        log_q = torch.log_softmax(torch.from_numpy(logits[rows]), -1)  # [t, V]
        wanted = targets[rows]
        nll -= float(log_q[: len(wanted)].gather(1, wanted[:, None]).sum(dtype=torch.float64))
        if reference is not None:
            log_p = reference.rows(rows)
            agree += int((logits[rows].argmax(axis=1) == reference.argmax[rows]).sum())
            kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    compared = reference is not None
    return WindowResult(nll, kl if compared else None, agree if compared else None, length)
