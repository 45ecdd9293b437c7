"""How the KV cache stores keys and values: `--quant-policy`, `--kv-rotation`, `--kv-16bit-layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turbomill.errors import UsageError

# As users spell them -> what the native core calls them.
QUANT_POLICIES = {"0": 0, "8": 8, "4": 4, "k8v4": 84, "16": 16, "17": 17}
NAMES = {0: "16-bit", 8: "int8", 4: "int4", 84: "int8 K, int4 V", 16: "fp8 e4m3", 17: "fp8 e5m2"}
K8V4 = 84
# Policies whose rows are rotated unless told otherwise: the gain of each is in docs/kv_cache.md.
ROTATED = (4, K8V4)


def parse_quant_policy(value: object) -> int:
    """The core's number of a policy, given as that or as users spell it. Raises UsageError."""
    if isinstance(value, str) and value in QUANT_POLICIES:
        return QUANT_POLICIES[value]
    if isinstance(value, int) and not isinstance(value, bool) and value in QUANT_POLICIES.values():
        return value
    raise UsageError(f"quant_policy is {value!r}, expected one of {', '.join(QUANT_POLICIES)}")


def parse_layers(text: str) -> tuple[int, ...]:
    """ "0,1,29" as numbers of layers. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise UsageError(f"--kv-16bit-layers {text}: {wrong[0]!r} is not the number of a layer")
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True)
class KvScheme:
    """One way to store keys and values. Raises UsageError when a value is out of range.

    With `rotation`, each head's K, less its mean, and V are multiplied by a Walsh-Hadamard matrix before they
    are stored; what attention gives is the same but for rounding. None: as the policy does best.
    """

    quant_policy: int = 0
    rotation: bool | None = None
    layers_16bit: tuple[int, ...] = ()  # that keep cache_dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "quant_policy", parse_quant_policy(self.quant_policy))
        layers = tuple(self.layers_16bit)
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in layers):
            raise UsageError(f"kv_16bit_layers is {list(layers)}, expected numbers of layers, from 0")
        object.__setattr__(self, "layers_16bit", tuple(sorted(set(layers))))

    @property
    def rotated(self) -> bool:
        """Whether K and V are stored rotated."""
        return self.quant_policy in ROTATED if self.rotation is None else self.rotation

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of EngineConfig, this package's and the native core's."""
        return {
            "quant_policy": self.quant_policy,
            "kv_rotation": self.rotated,
            "kv_16bit_layers": self.layers_16bit,
        }

    @property
    def options(self) -> list[str]:
        """What sets it on the command line."""
        spelled = next(name for name, number in QUANT_POLICIES.items() if number == self.quant_policy)
        arguments = ["--quant-policy", spelled]
        if self.rotated != KvScheme(self.quant_policy).rotated:
            arguments.append("--kv-rotation" if self.rotated else "--no-kv-rotation")
        if self.layers_16bit:
            arguments += ["--kv-16bit-layers", ",".join(map(str, self.layers_16bit))]
        return arguments

    def check_layers(self, num_layers: int) -> None:
        """Raise UsageError unless the model has the layers that are named."""
        if any(layer >= num_layers for layer in self.layers_16bit):
            raise UsageError(
                f"kv_16bit_layers names layer {self.layers_16bit[-1]}, "
                f"the model has {num_layers}: 0 to {num_layers - 1}"
            )

    def describe(self, plain: str = "16-bit") -> str:
        """In words; `plain` is what unquantized rows are."""
        text = NAMES[self.quant_policy] if self.quant_policy else plain
        if self.rotated:
            text += " rotated"
        if self.quant_policy and self.layers_16bit:
            text += f", layers {','.join(map(str, self.layers_16bit))} {plain}"
        return text
