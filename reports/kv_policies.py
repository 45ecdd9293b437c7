"""The KV cache's schemes that evaluations and plans know: a new one of the engine's is a line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from turbomill.engine.kv_scheme import K8V4, KvScheme
from turbomill.errors import UsageError

if TYPE_CHECKING:
    from turbomill.reports.runs import KvPolicy

PARAMETER_BYTES = 4  # an fp16 scale and zero, of each token and head


@dataclass(frozen=True)
class CachePolicy:
    """One scheme of the engine, as reports name it."""

    name: str
    quant_policy: int
    k_bits: int
    v_bits: int
    rotation: bool = False
    integers: bool = True  # codes; else floating-point numbers

    @property
    def scheme(self) -> KvScheme:
        """As the engine takes it."""
        return KvScheme(self.quant_policy, self.rotation)

    def bytes_of_head(self, head_dim: int) -> int:
        """K and V of one token of one head."""
        return sum(
            2 * head_dim if bits == 16 else head_dim * bits // 8 + PARAMETER_BYTES
            for bits in (self.k_bits, self.v_bits)
        )


POLICIES = {
    policy.name: policy
    for policy in (
        CachePolicy("16", 0, 16, 16, integers=False),
        CachePolicy("fp8", 16, 8, 8, integers=False),
        CachePolicy("fp8-e5m2", 17, 8, 8, integers=False),
        CachePolicy("8", 8, 8, 8),
        CachePolicy("k8v4", K8V4, 8, 4),
        CachePolicy("k8v4r", K8V4, 8, 4, rotation=True),
        CachePolicy("4", 4, 4, 4),
        CachePolicy("4r", 4, 4, 4, rotation=True),
    )
}
# What `eval kv` scores unless told otherwise, and what plans list: one scheme for each size.
EVALUATED = ("16", "fp8", "8", "k8v4r", "4", "4r")
PLANNED = ("16", "8", "fp8", "k8v4r", "4r")


def policy_of(kv: KvScheme) -> CachePolicy:
    """The policy of a scheme; it does not know of layers that are kept in 16 bits."""
    return next(p for p in POLICIES.values() if (p.quant_policy, p.rotation) == (kv.quant_policy, kv.rotated))


def in_words(row: KvPolicy) -> str:
    """ "8 bits", or what the scheme is."""
    if row.name.isdigit():
        return f"{row.name} bits"
    return KvScheme(row.quant_policy, row.rotation, tuple(row.layers_16bit)).describe()


def parse_policies(text: str) -> tuple[str, ...]:
    """ "0,16,8,k8v4,4,4r", as --quant-policy spells them with r for rotation, as the names above.

    The unquantized cache is always first. Raises UsageError.
    """
    names = {name: name for name in POLICIES} | {"0": "16", "16": "fp8", "17": "fp8-e5m2"}
    parts = [part.strip() for part in text.split(",")]
    if unknown := [part for part in parts if part not in names]:
        raise UsageError(f"--policies {text}: {unknown[0]!r} is not one of {', '.join(names)}")
    return tuple(dict.fromkeys(["16", *(names[part] for part in parts)]))
