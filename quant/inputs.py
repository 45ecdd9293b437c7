"""What calibration remembers of a linear's inputs. Enough for every loss here; the inputs themselves are
dropped."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStats:
    """Sums over tokens of the inputs x [K] of linears that read one activation, all fp32."""

    def __init__(self, channels: int) -> None:
        self.tokens = 0
        self.gram = torch.zeros(channels, channels)  # X^T X [K, K]
        self._absolute = torch.zeros(channels)  # sum of |x| [K]

    def add(self, x: Tensor) -> None:
        """Count x [..., K]."""
        x = x.reshape(-1, x.shape[-1]).float()
        self.tokens += x.shape[0]
        self.gram.addmm_(x.T, x)
        self._absolute += x.abs().sum(0)

    @property
    def absmean(self) -> Tensor:
        """Mean |x| of each channel [K]."""
        return self._absolute / max(self.tokens, 1)
