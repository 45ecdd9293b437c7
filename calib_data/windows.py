"""Token windows: how a text becomes the equal pieces that calibration and evaluation run on."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from turbomill.errors import TurbomillError

logger = logging.getLogger("turbomill.calib_data")

# Fewer tokens than this say nothing about a model: refuse rather than calibrate on noise.
MIN_TOKENS = 16


@dataclass(frozen=True)
class Windows:
    """Token windows of one length, with what they were cut from."""

    ids: Tensor  # int64 [n, T]
    source: str
    split: str
    fingerprint: str  # sha256 of the window's ids

    @property
    def count(self) -> int:
        """n, the number of windows."""
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """T, tokens per window."""
        return self.ids.shape[1]

    def batches(self, size: int) -> list[Tensor]:
        """The windows in order, `size` at a time: each [<= size, T]."""
        return list(self.ids.split(size))

    def describe(self) -> dict[str, object]:
        """What provenance records."""
        return {
            "source": self.source,
            "split": self.split,
            "windows": self.count,
            "length": self.length,
            "sha256": self.fingerprint,
        }


def fingerprint(ids: Tensor) -> str:
    """sha256 over the shape and the little-endian int64 ids."""
    digest = hashlib.sha256(str(tuple(ids.shape)).encode())
    digest.update(ids.to(torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def windows(ids: Tensor, n: int, length: int, source: str = "text") -> Tensor:
    """Cut `n` windows of `length` tokens at equal steps: window i is ids[i * step : i * step + length], step
    = len // n.

    A short text gives fewer windows, none overlapping, and a text shorter than one window gives one short
    window; both are logged. Under MIN_TOKENS tokens it is a TurbomillError. Returns int64 [n', T].
    """
    total = ids.numel()
    if total < MIN_TOKENS:
        raise TurbomillError(
            f"{source}: {total} tokens of text, expected at least {MIN_TOKENS} "
            f"(one window of {length} is best): give more text"
        )
    if total < length:
        logger.warning("%s: only %d tokens, one window of that length instead of %d", source, total, length)
        return ids.reshape(1, -1).to(torch.int64)
    if total < n * length:
        fewer = total // length
        logger.warning(
            "%s: %d tokens make %d windows of %d tokens, not the %d asked for",
            source,
            total,
            fewer,
            length,
            n,
        )
        n = fewer
    step = total // n
    return torch.stack([ids[i * step : i * step + length] for i in range(n)]).to(torch.int64)
