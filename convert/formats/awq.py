"""AWQ "gemm" (AutoAWQ): 4-bit codes, eight columns to an int32 word in an interleaved order.

`X.qweight` int32 [K, N/8], `X.qzeros` int32 [K/g, N/8], `X.scales` [K/g, N], optional `X.bias` [N];
w = (q - z) * s with the zeros stored as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turbomill.convert import native
from turbomill.convert.formats.base import TensorSource, WeightFormat, bias_of
from turbomill.convert.formats.order import require_plain
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import Linear, QuantGrid, QuantLinear, QuantScheme, storable_scales
from turbomill.errors import CheckpointError, UnsupportedModelError

# Column 8c + j of a row sits in nibble NIBBLE_OF_COLUMN[j] of word c.
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_words(codes: Tensor) -> Tensor:
    """uint8 [R, N] below 16 -> int32 [R, N/8]."""
    columns = codes.reshape(codes.shape[0], -1, 8)  # [R, N/8, 8]
    words = torch.zeros(columns.shape[:2], dtype=torch.int32)
    for j, nibble in enumerate(NIBBLE_OF_COLUMN):
        words |= columns[:, :, j].int() << 4 * nibble
    return words


def unpack_words(words: Tensor) -> Tensor:
    """int32 [R, N/8] -> uint8 [R, N]."""
    if native.available():
        return native.unpack_awq(words)
    codes = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for j, nibble in enumerate(NIBBLE_OF_COLUMN):
        codes[:, :, j] = (words >> 4 * nibble & 15).to(torch.uint8)
    return codes.reshape(words.shape[0], -1)


@dataclass(frozen=True)
class AwqFormat(WeightFormat):
    """AWQ gemm with one scheme for all quantized linears; `skip` are the modules left dense."""

    scheme: QuantScheme
    skip: list[str] = field(default_factory=list)

    name = "awq"

    def __post_init__(self) -> None:
        if self.scheme.bits != 4:
            raise UnsupportedModelError(f"AWQ gemm holds 4-bit weights, not {self.scheme.bits}")

    @classmethod
    def recognise(cls, config: dict[str, Any]) -> AwqFormat | None:
        """From `quantization_config`; the old sidecar's spelling (w_bit, q_group_size) too."""
        quant = config.get("quantization_config") or {}
        if quant.get("quant_method", "awq" if "w_bit" in quant else None) != "awq":
            return None
        version = str(quant.get("version", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModelError(f"config.json: AWQ version {version}: only gemm is supported")
        scheme = QuantScheme(
            bits=int(quant.get("bits", quant.get("w_bit", 4))),
            group=int(quant.get("group_size", quant.get("q_group_size", 128))),
            symmetric=bool(quant.get("sym", not quant.get("zero_point", True))),
        )
        return cls(scheme, list(quant.get("modules_to_not_convert") or []))

    def misfit(self, prefix: str, k: int, n: int) -> str:
        """Whole groups along K, whole words along N."""
        group = self.scheme.group if self.scheme.group > 0 else k
        if k % group == 0 and n % 8 == 0:
            return ""
        return f"AWQ gemm needs K divisible by the group and N by 8, got K={k}, N={n}, group {group}"

    def _group(self, prefix: str, k: int, n: int) -> int:
        if wrong := self.misfit(prefix, k, n):
            raise CheckpointError(f"{prefix}: {wrong}; choose a group size that divides K")
        return self.scheme.group if self.scheme.group > 0 else k

    def expected(self, prefix: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
        """qweight, scales and, unless they are all 8, qzeros."""
        groups = k // self._group(prefix, k, n)
        found = {f"{prefix}.qweight": (k, n // 8), f"{prefix}.scales": (groups, n)}
        return found if self.scheme.symmetric else {**found, f"{prefix}.qzeros": (groups, n // 8)}

    def optional(self, prefix: str) -> Sequence[str]:
        """qzeros, which some writers leave out of a symmetric model."""
        return (f"{prefix}.qzeros",)

    def values(self, prefix: str) -> str:
        """scales."""
        return f"{prefix}.scales"

    def unpack(self, source: TensorSource, prefix: str) -> QuantLinear:
        """One linear in canonical form."""
        words, grid = self._read(source, prefix)
        return grid.with_codes(unpack_words(words))

    def packed(self, source: TensorSource, prefix: str) -> PackedLinear | None:
        """Any linear."""
        return PackedLinear.of("awq", *self._read(source, prefix))

    def _read(self, source: TensorSource, prefix: str) -> tuple[Tensor, QuantGrid]:
        """The words of the codes [K, N/8], and the rest; symmetric zeros are checked."""
        words = source.tensor(f"{prefix}.qweight")
        k, n = words.shape[0], words.shape[1] * 8
        group = self._group(prefix, k, n)
        scheme = QuantScheme(4, group, self.scheme.symmetric)
        scales = source.tensor(f"{prefix}.scales")
        if source.has(f"{prefix}.qzeros"):
            zeros = unpack_words(source.tensor(f"{prefix}.qzeros"))
        elif scheme.symmetric:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        else:
            raise CheckpointError(f"{prefix}.qzeros: missing, though the config says zero_point")
        grid = QuantGrid(k, scales, zeros, scheme, bias_of(source, prefix))
        grid.validate(prefix, n)
        return words, grid

    def pack(self, prefix: str, linear: Linear) -> dict[str, Tensor]:
        """Raises CheckpointError when the shape does not fit the format."""
        if not isinstance(linear, QuantLinear) or linear.scheme.bits != 4:
            raise CheckpointError(f"{prefix}: AWQ gemm stores 4-bit linears only")
        require_plain(prefix, linear, "AWQ")
        self._group(prefix, *linear.shape)
        tensors = {
            f"{prefix}.qweight": pack_words(linear.codes),
            f"{prefix}.qzeros": pack_words(linear.zeros),
            f"{prefix}.scales": storable_scales(prefix, linear.scales),
        }
        return tensors if linear.bias is None else {**tensors, f"{prefix}.bias": linear.bias}

    def quantization_config(self) -> dict[str, Any]:
        """`zero_point` is always true: the zeros are in the file, and readers of "gemm" use them.

        `sym` is ours: it says that they are all 8.
        """
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": self.scheme.group,
            "zero_point": True,
            "sym": self.scheme.symmetric,
            "modules_to_not_convert": self.skip or None,
        }
