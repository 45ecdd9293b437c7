"""GPTQ (AutoGPTQ, GPTQModel): codes packed along K, zeros along N, 2, 3, 4 or 8 bits, low bits first.

`X.qweight` int32 [ceil(K*b/32), N], `X.qzeros` int32 [G, ceil(N*b/32)], `X.scales` [G, N],
`X.g_idx` int32 [K].
v1 files store zero - 1, each field on its own modulo 2^b; v2 files store the zero.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turbomill.convert.formats.base import TensorSource, WeightFormat, bias_of
from turbomill.convert.formats.bits import pack_bits, unpack_bits, words_for
from turbomill.convert.formats.order import order_of, require_plain
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import Linear, QuantGrid, QuantLinear, QuantScheme, storable_scales
from turbomill.errors import CheckpointError, UnsupportedModelError

log = logging.getLogger("turbomill.convert")
BITS = (2, 3, 4, 8)
VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class GptqFormat(WeightFormat):
    """GPTQ with one scheme, or one per linear where `dynamic` (regex -> overrides) says so."""

    scheme: QuantScheme
    version: int = 1
    dynamic: dict[str, dict[str, Any]] = field(default_factory=dict)
    _warned: set[int] = field(default_factory=set, repr=False, compare=False)  # versions found instead

    name = "gptq"

    def __post_init__(self) -> None:
        if self.scheme.bits not in BITS:
            raise UnsupportedModelError(f"GPTQ of {self.scheme.bits} bits: only {BITS} are supported")

    @classmethod
    def recognise(cls, config: dict[str, Any]) -> GptqFormat | None:
        """From `quantization_config` (quantize_config.json has the same keys)."""
        quant = config.get("quantization_config") or {}
        if quant.get("quant_method", "gptq" if "desc_act" in quant else None) != "gptq":
            return None
        form = quant.get("checkpoint_format") or "gptq"
        if form not in VERSIONS:
            raise UnsupportedModelError(
                f"config.json: GPTQ checkpoint_format {form}: only {', '.join(VERSIONS)} are supported"
            )
        scheme = QuantScheme(
            bits=int(quant.get("bits", 4)),
            group=int(quant.get("group_size", 128)),
            symmetric=bool(quant.get("sym", True)),
        )
        dynamic = dict(quant.get("dynamic") or {})
        for rule, change in dynamic.items():  # malformed ones raise here
            re.compile(rule.removeprefix("+:").removeprefix("-:"))
            _ = int(change.get("bits", 4)), int(change.get("group_size", 128))
        return cls(scheme, VERSIONS[form], dynamic)

    def scheme_of(self, prefix: str, k: int) -> QuantScheme:
        """The linear's scheme: the first matching rule of `dynamic` overrides; a group of -1 is K."""
        bits, group, symmetric = self.scheme.bits, self.scheme.group, self.scheme.symmetric
        for rule, change in self.dynamic.items():
            if rule.startswith("-:"):
                continue  # such a linear is dense and never gets here
            if re.match(rule.removeprefix("+:"), prefix):
                bits, group = int(change.get("bits", bits)), int(change.get("group_size", group))
                symmetric = bool(change.get("sym", symmetric))
                break
        if bits not in BITS:
            raise UnsupportedModelError(f"{prefix}: GPTQ of {bits} bits is not supported; supported: {BITS}")
        return QuantScheme(bits, group if group > 0 else k, symmetric)

    def misfit(self, prefix: str, k: int, n: int) -> str:
        """Whole words along K and along N; a short last group is read by most."""
        bits = self.scheme_of(prefix, k).bits
        if k * bits % 32 == 0 and n * bits % 32 == 0:
            return ""
        return f"GPTQ packs into whole 32-bit words; K={k}, N={n} at {bits} bits do not fit"

    def expected(self, prefix: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
        """qweight, qzeros, scales."""
        scheme = self.scheme_of(prefix, k)
        groups = -(-k // scheme.group)
        return {
            f"{prefix}.qweight": (words_for(k, scheme.bits), n),
            f"{prefix}.qzeros": (groups, words_for(n, scheme.bits)),
            f"{prefix}.scales": (groups, n),
        }

    def optional(self, prefix: str) -> Sequence[str]:
        """g_idx: each row's group, k // group where rows were not reordered."""
        return (f"{prefix}.g_idx",)

    def values(self, prefix: str) -> str:
        """scales."""
        return f"{prefix}.scales"

    def unpack(self, source: TensorSource, prefix: str) -> QuantLinear:
        """One linear in canonical form; rows that desc_act reordered are sorted by their groups."""
        words, grid = self._read(source, prefix)
        codes = unpack_bits(words, grid.scheme.bits, grid.k)
        return grid.with_codes(codes if grid.order is None else codes[grid.order])

    def packed(self, source: TensorSource, prefix: str) -> PackedLinear | None:
        """4 bits, rows in their places."""
        if self.scheme_of(prefix, 1).bits != 4:
            return None
        return PackedLinear.of("kn", *self._read(source, prefix))

    def _read(self, source: TensorSource, prefix: str) -> tuple[Tensor, QuantGrid]:
        """The words of the codes [ceil(K*b/32), N], and the rest, in the order of the sorted rows."""
        words, scales = source.tensor(f"{prefix}.qweight"), source.tensor(f"{prefix}.scales")
        g_idx = source.tensor(f"{prefix}.g_idx") if source.has(f"{prefix}.g_idx") else None
        bits = self.scheme_of(prefix, 1).bits
        k = g_idx.shape[0] if g_idx is not None else words.shape[0] * 32 // bits
        n = words.shape[1]
        scheme = self.scheme_of(prefix, k)
        groups = -(-k // scheme.group)
        if tuple(scales.shape) != (groups, n) or words.shape[0] != words_for(k, bits):
            raise CheckpointError(
                f"{prefix}: qweight {tuple(words.shape)}, scales {tuple(scales.shape)} do not agree with "
                f"K={k}, N={n}, {bits} bits, group {scheme.group}"
            )
        raw = unpack_bits(source.tensor(f"{prefix}.qzeros").T, bits, n).T.contiguous()  # [G, N]
        zeros = self._zeros(prefix, raw, scheme)
        order = order_of(f"{prefix}.g_idx", g_idx, scheme.group)
        grid = QuantGrid(
            k,
            scales=scales if order.groups is None else scales[order.groups],
            zeros=zeros if order.groups is None else zeros[order.groups],
            scheme=scheme,
            bias=bias_of(source, prefix),
            order=order.rows,
        )
        grid.validate(prefix, n)
        return words, grid

    def order(self, source: TensorSource, prefix: str) -> Tensor | None:
        """That of the sorted rows; None without desc_act."""
        if not source.has(f"{prefix}.g_idx"):
            return None
        g_idx = source.tensor(f"{prefix}.g_idx")
        return order_of(f"{prefix}.g_idx", g_idx, self.scheme_of(prefix, g_idx.shape[0]).group).rows

    def _zeros(self, prefix: str, raw: Tensor, scheme: QuantScheme) -> Tensor:
        """Zeros from the stored fields. A symmetric file shows which version it really holds."""
        version, half = self.version, 2 ** (scheme.bits - 1)
        if scheme.symmetric:
            stored = {1: half - 1, 2: half}
            version = next((v for v, value in stored.items() if bool((raw == value).all())), 0)
            if version == 0:
                raise CheckpointError(
                    f"{prefix}.qzeros: the config says sym, but not all zeros are {half}; set sym to false"
                )
            if version != self.version and version not in self._warned:
                self._warned.add(version)
                log.warning(
                    "%s.qzeros: the config says GPTQ v%d, the zeros are v%d; reading them as v%d",
                    *(prefix, self.version, version, version),
                )
        return raw if version == 2 else (raw + 1) & (2**scheme.bits - 1)

    def pack(self, prefix: str, linear: Linear) -> dict[str, Tensor]:
        """In this format's version; g_idx is k // group, unless the linear has an order of its own.

        Raises CheckpointError for a dense linear.
        """
        if not isinstance(linear, QuantLinear) or linear.scheme.bits not in BITS:
            raise CheckpointError(f"{prefix}: GPTQ stores linears of {BITS} bits")
        bits, (k, n) = linear.scheme.bits, linear.shape
        if wrong := self.misfit(prefix, k, n):
            raise CheckpointError(f"{prefix}: {wrong}")
        if linear.mins is not None:
            require_plain(prefix, linear, "GPTQ")
        mask, codes, g_idx = 2**bits - 1, linear.codes, (torch.arange(k) // linear.scheme.group).int()
        if linear.order is not None:  # each row back to its input
            back = linear.order.long().argsort()
            codes, g_idx = codes[back], g_idx[back].contiguous()
        raw = linear.zeros if self.version == 2 else (linear.zeros + mask) & mask  # zero - 1 modulo 2^b
        tensors = {
            f"{prefix}.qweight": pack_bits(codes, bits),
            f"{prefix}.qzeros": pack_bits(raw.T, bits).T.contiguous(),
            f"{prefix}.scales": storable_scales(prefix, linear.scales),
            f"{prefix}.g_idx": g_idx,
        }
        return tensors if linear.bias is None else {**tensors, f"{prefix}.bias": linear.bias}

    def quantization_config(self) -> dict[str, Any]:
        """For config.json, and the same for quantize_config.json."""
        config = {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "bits": self.scheme.bits,
            "group_size": self.scheme.group,
            "sym": self.scheme.symmetric,
            "desc_act": False,
        }
        return {**config, "dynamic": self.dynamic} if self.dynamic else config
