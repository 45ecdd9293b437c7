"""May this KV cache be used? Measurements against thresholds, in three words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turbomill.engine.kv_scheme import KvScheme
from turbomill.errors import UsageError
from turbomill.reports.kv_policies import policy_of
from turbomill.reports.runs import KvPolicy, LayerKv, Verdict

# Exit codes of `eval kv`: 1 and 2 are failures and usage errors.
EXIT_CODES: dict[Verdict, int] = {"safe": 0, "test first": 3, "do not use": 4}
ORDER: tuple[Verdict, ...] = ("safe", "test first", "do not use")


@dataclass(frozen=True)
class Thresholds:
    """Up to `safe` it is safe, above `max` it is not to be used, between the two it needs a test of its own.

    KL in nats beyond the unquantized cache's, the largest of any context length; drops of the accuracy of
    passkey retrieval and of copying, over all lengths.
    """

    kl_safe: float = 0.01
    kl_max: float = 0.1
    drop_safe: float = 0.05
    drop_max: float = 0.2
    outlier: float = 20.0  # times the head's median channel: K below 8 bits is then not safe

    def __post_init__(self) -> None:
        for name in ("kl", "drop"):
            low, high = getattr(self, f"{name}_safe"), getattr(self, f"{name}_max")
            if not 0 <= low <= high:
                raise UsageError(f"--{name}-safe {low} --{name}-max {high}: expected 0 <= safe <= max")
        if not self.outlier >= 1:
            raise UsageError(f"--outlier {self.outlier}: expected at least 1")


def outlier_layers(layers: Sequence[LayerKv], thresholds: Thresholds) -> list[int]:
    """Layers in whose K some channel is far larger than its head's median one."""
    return [row.layer for row in layers if row.k_outlier > thresholds.outlier]


def judge(
    policy: KvPolicy, base: KvPolicy, layers: Sequence[LayerKv], thresholds: Thresholds
) -> tuple[Verdict, list[str]]:
    """The verdict on `policy` beside the unquantized cache `base`, and why it is not "safe"."""
    found: list[tuple[Verdict, str]] = []

    def weigh(value: float, safe: float, most: float, what: str) -> None:
        if value > most:
            found.append(("do not use", f"{what}, more than {most:g}"))
        elif value > safe:
            found.append(("test first", f"{what}, more than {safe:g}"))

    if policy.kl is not None and base.kl is not None:
        kl = max(_added_kl(policy, base), policy.kl - base.kl)
        weigh(kl, thresholds.kl_safe, thresholds.kl_max, f"KL grows by {kl:.4f}")
    for name, ours, theirs in (
        ("passkey", policy.passkey, base.passkey),
        ("copy", policy.copied, base.copied),
    ):
        if ours is not None and theirs is not None:
            drop = theirs - ours
            what = f"{name} accuracy falls from {theirs:.2f} to {ours:.2f}"
            weigh(drop, thresholds.drop_safe, thresholds.drop_max, what)
    large = outlier_layers(layers, thresholds)
    if large and policy.quant_policy == 4 and not policy.rotation:
        found.append(("test first", f"K has outlier channels in layers {', '.join(map(str, large))}"))
    return ORDER[max((ORDER.index(verdict) for verdict, _ in found), default=0)], [why for _, why in found]


def _added_kl(policy: KvPolicy, base: KvPolicy) -> float:
    """The largest of any context length."""
    added = [
        ours.kl - theirs.kl
        for ours, theirs in zip(policy.by_length, base.by_length, strict=True)
        if ours.kl is not None and theirs.kl is not None
    ]
    return max(added, default=0.0)


def sensitive_layers(
    policy: KvPolicy, base: KvPolicy, layers: Sequence[LayerKv], thresholds: Thresholds
) -> tuple[int, ...]:
    """The fewest layers that, kept in 16 bits, should make rotated int4 safe.

    KL is taken to be a sum over layers, in proportion to what rounding does to each one's attention.
    """
    if policy.kl is None or base.kl is None:
        return ()
    kl = max(_added_kl(policy, base), policy.kl - base.kl)
    errors = {row.layer: row.k_error["4r"] + row.v_error["4r"] for row in layers}
    total, left = sum(errors.values()), sum(errors.values())
    kept: list[int] = []
    for layer in sorted(errors, key=lambda layer: -errors[layer]):
        if kl * left / total <= thresholds.kl_safe:
            break
        kept.append(layer)
        left -= errors[layer]
    return tuple(sorted(kept))


def conclude(policies: Sequence[KvPolicy]) -> tuple[Verdict, dict[str, Any]]:
    """The verdict on quantizing this model's cache, and the setting to use.

    Recommended is the smallest cache that is safe, of equal ones the one that errs least. The verdict is the
    best of any quantized cache; with none among `policies` it is that of the unquantized one, which is safe.
    """
    quantized = [p for p in policies if p.quant_policy]
    verdicts = [p.verdict or "safe" for p in quantized]
    best = ORDER[min((ORDER.index(verdict) for verdict in verdicts), default=0)]
    safe = [p for p in policies if p.verdict == "safe"]
    chosen = min(safe, key=lambda p: (p.bytes_per_token, p.kl or 0.0))
    scheme = KvScheme(chosen.quant_policy, chosen.rotation, tuple(chosen.layers_16bit))
    policy = policy_of(scheme)
    return best, {
        "name": chosen.name,
        "quant_policy": policy.quant_policy,
        "k_bits": policy.k_bits,
        "v_bits": policy.v_bits,
        "rotation": policy.rotation,
        "layers_in_16_bits": chosen.layers_16bit,
        "options": " ".join(scheme.options),
    }
