"""Tests of the PyTorch engine."""

from torch_threads import one_thread

__all__ = ["one_thread"]
