"""Mixed precision: which scheme each stage of each layer gets, within a budget of bits per weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turbomill.convert.linear import QuantScheme
from turbomill.errors import UsageError

# Groups tried beside the one asked for, and bits: those that other engines have kernels for.
GROUPS = (32, 64, 128)
BITS = (4, 8)
FEW_BITS = 3  # only where the budget is below every scheme of 4 bits


@dataclass(frozen=True)
class Unit:
    """A choice to make: linears that get one scheme, their weights, and what each scheme would cost in KL."""

    name: str
    weights: int
    losses: Mapping[QuantScheme, float]

    def bits(self, scheme: QuantScheme) -> float:
        """Scales and zeros counted."""
        return self.weights * scheme.bits_per_weight


def candidates(base: QuantScheme, ks: Sequence[int], budget: float) -> list[QuantScheme]:
    """The schemes to choose from for linears of K in-features `ks`, cheapest first.

    Raises UsageError when the budget is below the cheapest or not positive.
    """
    groups = {group for group in (*GROUPS, base.group) if group > 0 and all(k % group == 0 for k in ks)}
    if not groups:
        raise UsageError(f"--budget: no group of {', '.join(map(str, GROUPS))} divides every linear's K")

    def schemes(bits: Sequence[int]) -> list[QuantScheme]:
        found = [QuantScheme(b, group, base.symmetric) for b in bits for group in groups]
        return sorted(found, key=lambda scheme: scheme.bits_per_weight)

    found = schemes(BITS)
    if budget < found[0].bits_per_weight:
        found = schemes((FEW_BITS, *BITS))
    if budget < found[0].bits_per_weight:
        raise UsageError(
            f"--budget {budget}: below the smallest scheme, {found[0]} with {found[0].bits_per_weight:.4g} "
            "bits per weight"
        )
    return found


def allocate(units: Sequence[Unit], budget: float) -> dict[str, QuantScheme]:
    """The scheme of each unit, by name: the least total loss with at most `budget` bits per weight over all.

    Losses are taken to add up. A Lagrange multiplier prices a bit; what then is left of the budget goes to
    the upgrades that gain most per bit. Within one upgrade of the optimum (Everett, 1963).
    """
    allowed = budget * sum(unit.weights for unit in units)

    def choose(price: float) -> list[QuantScheme]:
        return [
            min(
                unit.losses,
                key=lambda s, unit=unit: (unit.losses[s] + price * unit.bits(s), unit.bits(s)),
            )
            for unit in units
        ]

    def spent(chosen: Sequence[QuantScheme]) -> float:
        return sum(unit.bits(scheme) for unit, scheme in zip(units, chosen, strict=True))

    chosen = choose(0.0)
    if spent(chosen) > allowed:
        low, high = 0.0, 1e-12
        while spent(choose(high)) > allowed:
            low, high = high, high * 4
            if high > 1e12:
                raise UsageError(f"--budget {budget}: less than the cheapest scheme of every linear")
        for _ in range(60):
            middle = (low + high) / 2
            if spent(choose(middle)) > allowed:
                low = middle
            else:
                high = middle
        chosen = _filled(units, choose(high), allowed)
    return {unit.name: scheme for unit, scheme in zip(units, chosen, strict=True)}


def _filled(units: Sequence[Unit], chosen: list[QuantScheme], allowed: float) -> list[QuantScheme]:
    """Spend what is left on upgrades, the best per bit first."""
    left = allowed - sum(unit.bits(scheme) for unit, scheme in zip(units, chosen, strict=True))
    while True:
        best: tuple[float, int, QuantScheme] | None = None
        for index, (unit, now) in enumerate(zip(units, chosen, strict=True)):
            for scheme, loss in unit.losses.items():
                more, gain = unit.bits(scheme) - unit.bits(now), unit.losses[now] - loss
                if 0 < more <= left and gain > 0 and (best is None or gain / more > best[0]):
                    best = (gain / more, index, scheme)
        if best is None:
            return chosen
        _, index, scheme = best
        left -= units[index].bits(scheme) - units[index].bits(chosen[index])
        chosen[index] = scheme
