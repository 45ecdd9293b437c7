"""What calibration remembers of a linear's inputs. Enough for every loss here; the inputs themselves are
dropped."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStats:
    """Sums over tokens of the inputs x [K] of linears that read one activation, all fp32."""

    def __init__(self, channels: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.gram = torch.zeros(channels, channels, device=device)  # X^T X [K, K]
        self.drift: Tensor | None = None  # (X' - X)^T X [K, K], X' being the full-precision model's inputs
        self._absolute = torch.zeros(channels, device=device)  # sum of |x| [K]

    def add(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Count x [..., K], and what the full-precision model has in its place."""
        x = x.reshape(-1, x.shape[-1]).float()
        self.tokens += x.shape[0]
        self.gram.addmm_(x.T, x)
        self._absolute += x.abs().sum(0)
        if reference is not None:
            if self.drift is None:
                self.drift = torch.zeros_like(self.gram)
            self.drift.addmm_((reference.reshape(x.shape) - x).T, x)

    @property
    def absmean(self) -> Tensor:
        """Mean |x| of each channel [K]."""
        return self._absolute / max(self.tokens, 1)
