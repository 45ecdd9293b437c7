"""What an architecture declares: where its tensors are, how they fuse, and which linears share a scale."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turbomill.errors import CheckpointError, UnsupportedModelError

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
    """One linear of the store: `parts` stacked along N, or interleaved in blocks of `interleave` rows.

    `order` gives, for each row of the store, its row in the stacked parts, where the checkpoint has its own
    order. `{e}` in the parts' names is an expert: the experts' linears lie one after the other in the store.
    """

    name: str
    parts: tuple[str, ...]
    interleave: int = 0
    order: Callable[[HfConfig], Tensor] | None = None

    @property
    def of_experts(self) -> bool:
        """Whether there is one such linear for every expert."""
        return "{e}" in self.parts[0]

    def names(self, expert: int = 0) -> tuple[str, ...]:
        """The parts' names within a layer."""
        return tuple(part.format(e=expert) for part in self.parts)


@dataclass(frozen=True)
class RunsAs:
    """Another architecture that computes the same from the same tensors, named or joined otherwise.

    Calibration and the reference run on its modelling code. `rename` are replacements in a tensor's full
    name, in order; `split` are linears that the other has in parts, which lie one after the other once the
    rows are in the order of the store (`Fusion.order`).
    """

    arch: Architecture
    rename: tuple[tuple[str, str], ...] = ()
    split: dict[str, tuple[str, ...]] = field(default_factory=dict)  # linear -> the other's linears
    config: Callable[[HfConfig], HfConfig] = dict  # what the other's config says


def _no_tables(_config: HfConfig) -> dict[str, Tensor]:
    return {}


def _no_matrices(_config: HfConfig, _layer: int) -> dict[str, tuple[str, tuple[int, int]]]:
    return {}


def _no_experts(_config: HfConfig) -> int:
    return 0


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
    models: str  # which models these are, for people
    tied_by_default: bool = False  # when config.json does not say
    remote_code: bool = False  # transformers has no modelling code of its own for it
    head_norms: dict[str, str] = field(default_factory=dict)  # like `norms`, of the heads: [D]
    norm_offset: float = 0.0  # what a norm multiplies by is its weight plus this
    head_transform: Callable[[Tensor], Tensor] | None = None  # what the model does to lm_head before using it
    # Other rotary tables -> inverse frequencies
    rope_tables: Callable[[HfConfig], dict[str, Tensor]] = _no_tables
    # A layer's dense matrices that are never quantized -> name in the store, shape
    matrices: Callable[[HfConfig, int], dict[str, tuple[str, tuple[int, int]]]] = _no_matrices
    num_experts: Callable[[HfConfig], int] = _no_experts
    # A layer's fusions where layers differ; `fusions` are then those that all layers have
    layer_fusions: Callable[[HfConfig, int], tuple[Fusion, ...]] | None = None
    runs_as: RunsAs | None = None  # where transformers has no code of its own for it, or other names

    @property
    def linears(self) -> tuple[str, ...]:
        """The linears of every layer, in the order of a forward pass."""
        return tuple(part for fusion in self.fusions for part in fusion.parts)

    @property
    def attention_output(self) -> str:
        """The linear after the attention, within a layer."""
        return next(fusion.parts[0] for fusion in self.fusions if fusion.name == "w_o")

    def fusions_of(self, config: HfConfig, index: int) -> tuple[Fusion, ...]:
        """Layer `index`'s fusions."""
        return self.fusions if self.layer_fusions is None else self.layer_fusions(config, index)

    def linears_of(self, config: HfConfig, index: int) -> tuple[str, ...]:
        """Layer `index`'s linears, those of all experts among them."""
        experts = self.num_experts(config)
        return tuple(
            name
            for fusion in self.fusions_of(config, index)
            for expert in range(experts if fusion.of_experts else 1)
            for name in fusion.names(expert)
        )

    def tied(self, config: HfConfig) -> bool:
        """Whether the head is the embedding."""
        return bool(config.get("tie_word_embeddings", self.tied_by_default))

    def num_layers(self, config: HfConfig) -> int:
        """L."""
        return int(config["num_hidden_layers"])

    def layer(self, index: int) -> str:
        """The prefix of layer `index`, with its dot."""
        return self.layer_prefix.format(i=index)

    def linear_prefixes(self, config: HfConfig) -> list[str]:
        """Every decoder linear's full name without `.weight`, layer by layer."""
        return [
            self.layer(index) + linear
            for index in range(self.num_layers(config))
            for linear in self.linears_of(config, index)
        ]

    def other_weights(self, config: HfConfig) -> dict[str, tuple[int, ...]]:
        """The tensors that are no layer's linear and their shapes: embedding, norms, the head unless tied."""
        vocab, hidden = int(config["vocab_size"]), int(config["hidden_size"])
        found: dict[str, tuple[int, ...]] = {self.embedding: (vocab, hidden)}
        dim = int(self.model_config(config)["head_dim"]) if self.head_norms else 0
        for index in range(self.num_layers(config)):
            prefix = self.layer(index)
            found |= {f"{prefix}{norm}.weight": (hidden,) for norm in self.norms}
            found |= {f"{prefix}{norm}.weight": (dim,) for norm in self.head_norms}
            matrices = self.matrices(config, index)
            found |= {f"{prefix}{name}.weight": shape for name, (_, shape) in matrices.items()}
        found[self.final_norm] = (hidden,)
        return found if self.tied(config) else {**found, self.head: (vocab, hidden)}

    def rope_inv_freq(self, config: HfConfig) -> Tensor:
        """RoPE's inverse frequencies, fp32 [D/2]."""
        return self.rope(config)[0]


_REGISTRY: dict[str, Architecture] = {}


def register(architecture: Architecture) -> Architecture:
    """Make an architecture known by its Hugging Face name."""
    _REGISTRY[architecture.name] = architecture
    return architecture


def architectures() -> list[Architecture]:
    """Every architecture, by name."""
    # Each registers itself.
    from turbomill.convert.models import baichuan, gemma, glm4, internlm, llama, moe, phi3, qwen  # noqa: F401

    return [_REGISTRY[name] for name in sorted(_REGISTRY, key=str.lower)]


def architecture_table() -> str:
    """The supported architectures as a Markdown table: the README's."""
    rows = [f"| `{arch.name}` | {arch.models} |" for arch in architectures()]
    return "\n".join(["| architecture | models |", "|---|---|", *rows])


# What reading a config of wrong types or sizes may raise.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def _try(arch: Architecture, config: HfConfig) -> None:
    """Read everything from the config that will be asked for: what is wrong with it comes out here."""
    arch.check(config)
    arch.model_config(config)
    readers = (arch.linear_shapes, arch.linear_biases, arch.scale_groups, arch.rope, arch.rope_tables)
    for read in (*readers, arch.other_weights):
        read(config)
    for index in range(arch.num_layers(config)):
        arch.fusions_of(config, index)
    int(config.get("max_position_embeddings", 0))


def find_architecture(config: HfConfig) -> Architecture:
    """The architecture config.json names. Raises UnsupportedModelError for an unknown one or variant."""
    known = {arch.name: arch for arch in architectures()}
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: architectures is {names!r}, expected a list of names")
    for name in names:
        if name in known:
            try:
                _try(known[name], config)
            except MALFORMED as error:
                reason = str(error).strip().partition("\n")[0]
                raise CheckpointError(
                    f"config.json: not a valid config of {name}: {type(error).__name__}: {reason}"
                ) from error
            return known[name]
    what = ", ".join(names) or f"model_type {config.get('model_type', 'missing')}"
    wanted = str(names[0] if names else config.get("model_type", ""))
    # Without the suffix that all have in common.
    short = {name.removesuffix("ForCausalLM").lower(): name for name in known}
    nearest = difflib.get_close_matches(wanted.removesuffix("ForCausalLM").lower(), short, n=3, cutoff=0.0)
    raise UnsupportedModelError(
        f"config.json: architecture {what} is not supported; nearest supported: "
        f"{', '.join(short[name] for name in nearest)}; `turbomill inspect --architectures` lists all; "
        "--backend pytorch runs what else transformers has code for"
    )
