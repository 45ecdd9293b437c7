"""ggml's block types as numbers, and the simplest of 4 and 8 bits as codes without another rounding.

A block is 32 neighbours along K. Q4_0 is fp16 d and sixteen bytes, w = d * (q - 8); Q4_1 is fp16 d, fp16 m
and sixteen bytes, w = d * q + m. The low nibbles are the block's first half, the high ones its second. Q8_0
is fp16 d and 32 signed bytes, w = d * q.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from turbomill.convert.linear import QuantLinear, QuantScheme

BLOCK = 32
SCHEMES = {
    "Q4_0": QuantScheme(4, BLOCK, True),
    "Q4_1": QuantScheme(4, BLOCK, False, mins=True),
    "Q8_0": QuantScheme(8, BLOCK, True),
}


def values_of(rows: np.ndarray, kind: str) -> Tensor:
    """Rows of bytes [..., bytes] as fp32 [..., K]. Raises NotImplementedError for a type of another use."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(np.array(dequantize(rows, GGMLQuantizationType[kind]), dtype=np.float32))


def codes_of(rows: np.ndarray, kind: str, bias: Tensor | None = None) -> QuantLinear:
    """Rows of one of SCHEMES [N, bytes] as a canonical linear; dequantized, it has ggml's bits."""
    scheme = SCHEMES[kind]
    params = 2 if scheme.mins else 1  # fp16 numbers before the codes
    size = 2 * params + BLOCK * scheme.bits // 8
    blocks = np.ascontiguousarray(rows).reshape(rows.shape[0], -1, size)  # [N, G, ...]
    numbers = torch.from_numpy(blocks[:, :, : 2 * params].copy().view(np.float16))  # [N, G, params]
    stored = torch.from_numpy(blocks[:, :, 2 * params :].copy())  # [N, G, 16 or 32]
    if scheme.bits == 4:
        stored = torch.cat([stored & 15, stored >> 4], 2)
    else:
        stored ^= 128  # a signed byte plus 128
    codes = stored.flatten(1).T.contiguous()  # [K, N]
    scales = numbers[:, :, 0].T.contiguous()  # [G, N]
    zeros = torch.full(scales.shape, 0 if scheme.mins else 2 ** (scheme.bits - 1), dtype=torch.uint8)
    mins = numbers[:, :, 1].T.contiguous() if scheme.mins else None
    return QuantLinear(codes, scales, zeros, scheme, bias, mins)
