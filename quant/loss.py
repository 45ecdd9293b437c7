"""The one loss everything here is judged by: the squared error of a linear's output on the calibration
inputs."""

from __future__ import annotations

from torch import Tensor


def output_loss(weight: Tensor, other: Tensor, hessian: Tensor) -> float:
    """||X W^T - X W'^T||^2 = tr((W - W') H (W - W')^T) for weights [N, K] and H = X^T X [K, K], without X."""
    delta = weight - other
    return float(((delta @ hessian) * delta).sum())
