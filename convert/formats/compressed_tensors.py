"""compressed-tensors "pack-quantized" (llm-compressor, vLLM): codes of 2 to 8 bits, low bits first.

`X.weight_packed` int32 [N, ceil(K*b/32)], `X.weight_scale` [N, G], `X.weight_shape` int64 [2] = (N, K) and,
unless symmetric, `X.weight_zero_point` int32 [ceil(N*b/32), G], packed along N. Codes and zeros are signed in
the format's own terms and stored with 2^(b-1) added, which makes the stored fields the canonical codes.

Several config groups give each linear its own scheme. A target is a module's name, `re:` and a pattern, or
the class `Linear`; the library looks for names first, then patterns in sorted order, then classes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turbomill.convert.formats.base import TensorSource, WeightFormat, bias_of
from turbomill.convert.formats.bits import pack_bits, unpack_bits, words_for
from turbomill.convert.formats.order import RowOrder, order_of, require_plain
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import Linear, QuantGrid, QuantLinear, QuantScheme, storable_scales
from turbomill.errors import CheckpointError, UnsupportedModelError

PACKED = "pack-quantized"
BITS = range(2, 9)
CLASS = "Linear"  # the target that every linear answers to


@dataclass(frozen=True)
class CompressedTensorsFormat(WeightFormat):
    """Pack-quantized linears. `scheme` is most linears', and all linears' where there are no `targets`.

    `targets` gives the scheme of each target, `ignore` the modules left dense.
    """

    scheme: QuantScheme
    targets: Mapping[str, QuantScheme] = field(default_factory=dict)
    ignore: Sequence[str] = ("lm_head",)

    name = "compressed-tensors"

    def __post_init__(self) -> None:
        for target, scheme in {CLASS: self.scheme, **self.targets}.items():
            try:
                re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            except re.error as error:
                raise CheckpointError(
                    f"compressed-tensors target {target}: not a pattern: {error}"
                ) from error
            if scheme.bits not in BITS:
                raise UnsupportedModelError(
                    f"compressed-tensors target {target}: {scheme.bits} bits; supported: 2 to 8"
                )

    @classmethod
    def mixed(
        cls, schemes: Mapping[str, QuantScheme], ignore: Sequence[str] = ("lm_head",)
    ) -> CompressedTensorsFormat:
        """Each linear, by its full name, with a scheme of its own; the commonest is the one for `Linear`."""
        common = Counter(schemes.values()).most_common(1)[0][0]
        others = {name: scheme for name, scheme in schemes.items() if scheme != common}
        return cls(common, {CLASS: common, **others} if others else {}, ignore)

    @classmethod
    def recognise(cls, config: dict[str, Any]) -> CompressedTensorsFormat | None:
        """From `quantization_config`. Raises UnsupportedModelError for other than packed integers."""
        quant = config.get("quantization_config") or {}
        if quant.get("quant_method") != cls.name:
            return None
        for key in ("kv_cache_scheme", "transform_config"):
            if quant.get(key):
                raise UnsupportedModelError(
                    f"config.json: compressed-tensors with a {key} is not supported; "
                    "quantize the weights alone"
                )
        targets: dict[str, QuantScheme] = {}
        for name, group in (quant.get("config_groups") or {}).items():
            scheme = _scheme_of_group(name, group, quant.get("format"))
            targets |= {str(target): scheme for target in group.get("targets") or ()}
        if not targets:
            raise CheckpointError("config.json: compressed-tensors without config_groups that name targets")
        scheme = targets.get(CLASS) or next(iter(targets.values()))
        only = set(targets) == {CLASS}
        return cls(scheme, {} if only else targets, tuple(quant.get("ignore") or ()))

    def scheme_of(self, prefix: str, k: int) -> QuantScheme:
        """The scheme of the target that is most specific to the linear; a group of -1 is K."""
        found = self._target(prefix)
        if found is None:
            raise CheckpointError(f"{prefix}: is packed, but no target of quantization_config names it")
        return QuantScheme(found.bits, found.group if found.group > 0 else k, found.symmetric)

    def _target(self, prefix: str) -> QuantScheme | None:
        if not self.targets:
            return self.scheme
        if prefix in self.targets:
            return self.targets[prefix]
        for pattern in sorted(target for target in self.targets if target.startswith("re:")):
            if re.match(pattern.removeprefix("re:"), prefix):
                return self.targets[pattern]
        return self.targets.get(CLASS)

    def misfit(self, prefix: str, k: int, n: int) -> str:
        """Whole groups along K: the format's readers refuse a short one."""
        group = self.scheme_of(prefix, k).group
        if k % group == 0:
            return ""
        return f"compressed-tensors needs K divisible by the group, got K={k}, group {group}"

    def expected(self, prefix: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
        """weight_packed, weight_scale, weight_shape and, unless symmetric, weight_zero_point."""
        scheme = self.scheme_of(prefix, k)
        groups = -(-k // scheme.group)
        found: dict[str, tuple[int, ...]] = {
            f"{prefix}.weight_packed": (n, words_for(k, scheme.bits)),
            f"{prefix}.weight_scale": (n, groups),
            f"{prefix}.weight_shape": (2,),
        }
        if not scheme.symmetric:
            found[f"{prefix}.weight_zero_point"] = (words_for(n, scheme.bits), groups)
        return found

    def optional(self, prefix: str) -> Sequence[str]:
        """weight_g_idx, of writers that reordered columns."""
        return (f"{prefix}.weight_g_idx",)

    def values(self, prefix: str) -> str:
        """weight_scale."""
        return f"{prefix}.weight_scale"

    def unpack(self, source: TensorSource, prefix: str) -> QuantLinear:
        """One linear in canonical form; columns that actorder scattered are sorted by their groups."""
        words, grid = self._read(source, prefix)
        codes = unpack_bits(words.T, grid.scheme.bits, grid.k)
        return grid.with_codes(codes if grid.order is None else codes[grid.order])

    def packed(self, source: TensorSource, prefix: str) -> PackedLinear | None:
        """4 bits, columns in their places."""
        if self.scheme_of(prefix, 1).bits != 4:
            return None
        return PackedLinear.of("nk", *self._read(source, prefix))

    def _read(self, source: TensorSource, prefix: str) -> tuple[Tensor, QuantGrid]:
        """The words of the codes [N, ceil(K*b/32)], and the rest, in the order of the sorted columns."""
        n, k = (int(size) for size in source.tensor(f"{prefix}.weight_shape"))
        scheme = self.scheme_of(prefix, k)
        words, scales = source.tensor(f"{prefix}.weight_packed"), source.tensor(f"{prefix}.weight_scale")
        groups = -(-k // scheme.group)
        if tuple(scales.shape) != (n, groups) or tuple(words.shape) != (n, words_for(k, scheme.bits)):
            raise CheckpointError(
                f"{prefix}: weight_packed {tuple(words.shape)}, weight_scale {tuple(scales.shape)} do not "
                f"agree with K={k}, N={n}, {scheme.bits} bits, group {scheme.group}"
            )
        order = self._order(source, prefix, k)
        if scheme.symmetric:
            zeros = torch.full((groups, n), 2 ** (scheme.bits - 1), dtype=torch.uint8)
        else:
            packed = source.tensor(f"{prefix}.weight_zero_point")
            zeros = unpack_bits(packed, scheme.bits, n).T.contiguous()  # [G, N]
        scales = scales.T.contiguous()
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
        """That of the sorted columns; None without actorder group."""
        if not source.has(f"{prefix}.weight_g_idx"):
            return None
        return self._order(source, prefix, source.tensor(f"{prefix}.weight_g_idx").shape[0]).rows

    def _order(self, source: TensorSource, prefix: str, k: int) -> RowOrder:
        """-1 everywhere is the writer's "none"."""
        name = f"{prefix}.weight_g_idx"
        g_idx = source.tensor(name) if source.has(name) else None
        if g_idx is not None and g_idx.shape != (k,):
            raise CheckpointError(f"{name}: is {list(g_idx.shape)}, expected [{k}]")
        if g_idx is None or bool((g_idx == -1).all()):
            return RowOrder()
        return order_of(name, g_idx, self.scheme_of(prefix, k).group)

    def pack(self, prefix: str, linear: Linear) -> dict[str, Tensor]:
        """Raises CheckpointError for a dense linear, and for K not a multiple of the group."""
        if not isinstance(linear, QuantLinear) or linear.scheme.bits not in BITS:
            raise CheckpointError(f"{prefix}: compressed-tensors stores linears of 2 to 8 bits")
        bits, (k, n) = linear.scheme.bits, linear.shape
        require_plain(prefix, linear, "compressed-tensors")
        if wrong := self.misfit(prefix, k, n):
            raise CheckpointError(f"{prefix}: {wrong}; choose a group size that divides K")
        tensors = {
            f"{prefix}.weight_packed": pack_bits(linear.codes, bits).T.contiguous(),
            f"{prefix}.weight_scale": storable_scales(prefix, linear.scales).T.contiguous(),
            f"{prefix}.weight_shape": torch.tensor([n, k], dtype=torch.int64),
        }
        if not linear.scheme.symmetric:
            tensors[f"{prefix}.weight_zero_point"] = pack_bits(linear.zeros.T, bits)
        return tensors if linear.bias is None else {**tensors, f"{prefix}.bias": linear.bias}

    def quantization_config(self) -> dict[str, Any]:
        """One config group for each scheme."""
        by_scheme: dict[QuantScheme, list[str]] = {}
        for target, scheme in (self.targets or {CLASS: self.scheme}).items():
            by_scheme.setdefault(scheme, []).append(target)
        groups = {
            f"group_{index}": {"targets": targets, "weights": _weights(scheme), "format": PACKED}
            for index, (scheme, targets) in enumerate(by_scheme.items())
        }
        return {
            "quant_method": self.name,
            "format": PACKED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
        }


def _weights(scheme: QuantScheme) -> dict[str, Any]:
    whole = scheme.group <= 0
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else scheme.group,
        "dynamic": False,
    }


def _scheme_of_group(name: str, group: dict[str, Any], form: str | None) -> QuantScheme:
    """A config group's scheme; its own `format` goes before the whole's. Raises if not weight-only."""
    weights, where = group.get("weights") or {}, f"config.json: compressed-tensors {name}"
    form = group.get("format") or form
    if form != PACKED:
        raise UnsupportedModelError(f"{where}: format {form} is not supported; supported: {PACKED}")
    if group.get("input_activations") or group.get("output_activations"):
        raise UnsupportedModelError(f"{where}: activations are quantized; only weight-only schemes are known")
    strategy, kind = weights.get("strategy"), weights.get("type", "int")
    size = weights.get("group_size")
    if strategy is None:  # the library's rule
        strategy = "channel" if size in (None, -1) else "group"
    if kind != "int" or strategy not in ("group", "channel"):
        raise UnsupportedModelError(
            f"{where}: {kind} weights by {strategy} are not supported; supported: int, by group or channel"
        )
    group_size = -1 if strategy == "channel" else int(size or 0)
    if group_size == 0:
        raise CheckpointError(f"{where}: strategy group without a group_size")
    return QuantScheme(int(weights["num_bits"]), group_size, bool(weights.get("symmetric", True)))
