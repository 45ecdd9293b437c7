"""The KV cache's precisions that evaluations and plans know: a new one of the engine's is a line here."""

from __future__ import annotations

from dataclasses import dataclass

from turbomill.errors import UsageError

PARAMETER_BYTES = 4  # an fp16 scale and zero, of each token and head


@dataclass(frozen=True)
class CachePolicy:
    """One `quant_policy` of the engine."""

    quant_policy: int
    name: str
    k_bits: int
    v_bits: int

    def bytes_of_head(self, head_dim: int) -> int:
        """K and V of one token of one head."""
        return sum(
            2 * head_dim if bits == 16 else head_dim * bits // 8 + PARAMETER_BYTES
            for bits in (self.k_bits, self.v_bits)
        )


POLICIES = {
    policy.quant_policy: policy
    for policy in (CachePolicy(0, "16", 16, 16), CachePolicy(8, "8", 8, 8), CachePolicy(4, "4", 4, 4))
}


def parse_policies(text: str) -> tuple[int, ...]:
    """ "0,8,4", also spelled "16,8,4", as quant_policy numbers; 0 is always first. Raises UsageError."""
    names = {policy.name: number for number, policy in POLICIES.items()} | {"0": 0}
    parts = [part.strip() for part in text.split(",")]
    if unknown := [part for part in parts if part not in names]:
        raise UsageError(f"--policies {text}: {unknown[0]!r} is not one of {', '.join(names)}")
    return tuple(dict.fromkeys([0, *(names[part] for part in parts)]))
