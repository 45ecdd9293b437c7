"""Weights and plans that the fused kernels are tried on, at any number of bits."""

from __future__ import annotations

import pytest

from turbomill import _core

HALVED = 7  # warpgroups, of kernels whose thread blocks share rows of N, and never K
FUSED_CASES = [  # N, K, group
    (15, 64, 32),
    (65, 128, 32),
    (80, 192, 64),
    (200, 320, 320),
    (16, 40, 64),
    (333, 1088, 32),
    (520, 1088, 64),
    (256, 2048, 128),
    (1160, 512, 128),
]


def fused_kernels(bits: int) -> list[tuple[int, int, int]]:
    """The kernels (warpgroups, tokens, blocks); skips the test where there are none."""
    if not _core.kernels_cuda.w4_fused_runs():
        pytest.skip("needs a GPU of capability 9.0 and machine code for 90a")
    return _core.kernels_cuda.fused_kernels(bits)


def most_splits(warpgroups: int, k: int, limit: int = 8) -> int:
    """Of K, in a plan of a kernel of so many warpgroups."""
    return 1 if warpgroups == HALVED else min(limit, -(-k // 128))
