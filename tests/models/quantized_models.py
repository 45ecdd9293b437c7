"""A dense checkpoint with its decoder linears rounded to the nearest codes, in any format."""

from __future__ import annotations

from pathlib import Path

import torch

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.writer import CheckpointWriter


def nearest(weight: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype) -> QuantLinear:
    """Round-to-nearest of a weight [N, K]; a last group may be short."""
    n, k = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -k % scheme.group))
    groups = whole.T.reshape(-1, scheme.group, n)
    top = 2**scheme.bits - 1
    if scheme.symmetric:
        scales = (groups.abs().amax(1) * 2 / top).to(dtype)
        zeros = torch.full(scales.shape, top // 2 + 1, dtype=torch.uint8)
    else:
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).to(torch.uint8)
    codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, top)
    return QuantLinear(codes.to(torch.uint8).reshape(-1, n)[:k].contiguous(), scales, zeros, scheme)


def quantized(path: Path, fmt: WeightFormat, dtype: torch.dtype) -> Path:
    """The checkpoint at `path` with its decoder linears in `fmt`, beside it."""
    source, out = open_checkpoint(path), path.with_name(path.name + "-quantized")
    linears = set(source.arch.linear_prefixes(source.config))
    config = source.config | {"quantization_config": fmt.quantization_config()}
    with CheckpointWriter(out, config) as writer:
        for name in source.names():
            prefix = name.removesuffix(".weight")
            if prefix in linears:
                weight = source.tensor(name)
                scheme = fmt.scheme_of(prefix, weight.shape[1])
                assert scheme is not None
                for key, tensor in fmt.pack(prefix, nearest(weight, scheme, dtype)).items():
                    writer.add(key, tensor)
            else:
                writer.add(name, source.tensor(name))
        writer.finish()
    return out
