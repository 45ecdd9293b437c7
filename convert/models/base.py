"""What an architecture declares: where its tensors are, how they fuse, and which linears share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turbomill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

HfConfig = dict[str, Any]


@dataclass(frozen=True)
class ScaleGroup:
    """Linears that read one activation: AWQ scales their columns by s and divides `previous`'s output by s.

    `module` is the layer's sub-module whose output tells how good a scale is. Names are within a layer.
    """

    previous: str
    linears: tuple[str, ...]
    module: str


@dataclass(frozen=True)
class Fusion:
    """One linear of the store: `parts` stacked along N, or interleaved in blocks of `interleave` rows."""

    name: str
    parts: tuple[str, ...]
    interleave: int = 0


@dataclass(frozen=True)
class Architecture:
    """A decoder's names and sizes. Names are those of the Hugging Face checkpoint; `{i}` is the layer."""

    name: str  # as in config.json's `architectures`
    layer_prefix: str  # "model.layers.{i}."
    embedding: str
    final_norm: str
    head: str
    norms: dict[str, str]  # a layer's norm -> its name in the store
    fusions: tuple[Fusion, ...]
    linear_shapes: Callable[[HfConfig], dict[str, tuple[int, int]]]  # layer linear -> (K, N)
    linear_biases: Callable[[HfConfig], dict[str, bool]]  # layer linear -> whether it has a bias
    scale_groups: Callable[[HfConfig], tuple[ScaleGroup, ...]]
    model_config: Callable[[HfConfig], dict[str, Any]]  # the fields of turbomill._core.ModelConfig
    rope: Callable[[HfConfig], tuple[Tensor, float]]  # inverse frequencies fp32 [D/2], attention factor
    check: Callable[[HfConfig], None]  # raises UnsupportedModelError for a variant not handled

    @property
    def linears(self) -> tuple[str, ...]:
        """A layer's linears, in the order of a forward pass."""
        return tuple(part for fusion in self.fusions for part in fusion.parts)

    def num_layers(self, config: HfConfig) -> int:
        """L."""
        return int(config["num_hidden_layers"])

    def layer(self, index: int) -> str:
        """The prefix of layer `index`, with its dot."""
        return self.layer_prefix.format(i=index)

    def linear_prefixes(self, config: HfConfig) -> list[str]:
        """Every decoder linear's full name without `.weight`, layer by layer."""
        return [
            self.layer(index) + linear for index in range(self.num_layers(config)) for linear in self.linears
        ]

    def other_weights(self, config: HfConfig) -> list[str]:
        """The tensors that are no layer's linear: embedding, norms, and the head unless it is tied."""
        norms = [
            f"{self.layer(index)}{norm}.weight"
            for index in range(self.num_layers(config))
            for norm in self.norms
        ]
        head = [] if config.get("tie_word_embeddings") else [self.head]
        return [self.embedding, *norms, self.final_norm, *head]

    def rope_inv_freq(self, config: HfConfig) -> Tensor:
        """RoPE's inverse frequencies, fp32 [D/2]."""
        return self.rope(config)[0]


_REGISTRY: dict[str, Architecture] = {}


def register(architecture: Architecture) -> Architecture:
    """Make an architecture known by its Hugging Face name."""
    _REGISTRY[architecture.name] = architecture
    return architecture


def find_architecture(config: HfConfig) -> Architecture:
    """The architecture config.json names. Raises UnsupportedModelError for an unknown one or variant."""
    from turbomill.convert.models import llama  # noqa: F401  (registers itself)

    names = config.get("architectures") or []
    for name in names:
        if name in _REGISTRY:
            _REGISTRY[name].check(config)
            return _REGISTRY[name]
    what = ", ".join(map(str, names)) or f"model_type {config.get('model_type', 'missing')}"
    raise UnsupportedModelError(
        f"config.json: architecture {what} is not supported; supported: {', '.join(_REGISTRY)}"
    )
