"""The bytes of a model's weights and KV cache, from its config alone: no weights, no engine.

The arithmetic of the public sizing guides (weights = parameters * bits / 8; KV per token = 2 * layers * KV
heads * head dim * bytes), with what they leave out: scales and zeros, padding to tiles, whole blocks. Tests
hold it to the store's real bytes and the engine's real block count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from turbomill.convert.models.base import Architecture, Fusion, HfConfig, find_architecture
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.store import open_store
from turbomill.convert.store.layout import padded, stored_group
from turbomill.engine.cache_size import SIZE, UNITS
from turbomill.errors import CheckpointError, UsageError
from turbomill.reports.kv_policies import POLICIES, CachePolicy

MIB = 1 << 20
# Total memory, in MiB, about as the driver reports it.
GPUS = {
    "T4": 15360,
    "L4": 23034,
    "A10": 23028,
    "A100-40": 40960,
    "A100": 81920,
    "L40S": 46068,
    "H100": 81559,
    "H200": 143771,
    "B200": 183359,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
}
CONTEXT = 512 * MIB  # an allowance for the CUDA context and what libraries keep for themselves
SCALE_BYTES = 2


def parse_memory(text: str) -> int:
    """Free bytes of a GPU by its name (less its context), or of a size such as 80GiB. Raises UsageError."""
    names = {name.replace("-", "").upper(): mib for name, mib in GPUS.items()}
    if mib := names.get(re.sub(r"[-_ ]", "", text).upper()):
        return mib * MIB - CONTEXT
    if (size := SIZE.fullmatch(text.strip())) and float(size[1]) > 0:
        return int(float(size[1]) * UNITS[size[2].upper()])
    raise UsageError(
        f"--gpu {text}: expected a size such as 80GiB, or one of {', '.join(GPUS)} (its whole memory is free)"
    )


@dataclass(frozen=True)
class Shape:
    """What counts of a model: its KV cache and, for each weight scheme, the bytes of its weights."""

    name: str
    architecture: str
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weights: Mapping[str, int]  # scheme's name -> bytes

    def kv_bytes_per_token(self, policy: CachePolicy, layers_16bit: Sequence[int] = ()) -> int:
        """K and V of all layers: 16 bits each, or codes with an fp16 scale and zero for each head."""
        kept = len(layers_16bit)
        coded, plain = (p.bytes_of_head(self.head_dim) for p in (policy, POLICIES["16"]))
        return self.num_kv_heads * ((self.num_layers - kept) * coded + kept * plain)


def shape_of(model: str, group: int = 128) -> Shape:
    """Of MODEL: a config.json or its directory (weights are not needed), a GGUF file, a store, a hub name."""
    path, config = _config(model)
    if config is None:  # a store has its sizes, and one scheme: its own
        store = open_store(path)
        fields, kept = store.model, store.scheme or "16"
        weights = {str(kept): sum(tensor.nbytes for tensor in store.tensors.values())}
        sizes = (fields["num_layers"], fields["num_kv_heads"], fields["head_dim"])
        return Shape(model, store.manifest["architecture"], store.context_length, *sizes, weights)
    arch = find_architecture(config)
    fields = arch.model_config(config)
    return Shape(
        model,
        arch.name,
        int(config.get("max_position_embeddings", 2048)),
        *(fields["num_layers"], fields["num_kv_heads"], fields["head_dim"]),
        {str(bits): weight_bytes(arch, config, bits, group) for bits in (16, 8, 4)},
    )


def _config(model: str) -> tuple[Path, HfConfig | None]:
    """Where MODEL is and its config; None for a store. Of a hub name, only config.json is downloaded."""
    from turbomill.convert.hf import read_json

    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path, read_json(path)
    if not path.exists() and "/" in model:
        return _hub_config(model)
    path = resolve_model(model)
    kind = kind_of(path)
    if kind == "store":
        return path, None
    if kind == "hf":
        return path, read_json(path / "config.json")
    from turbomill.convert.checkpoint import open_checkpoint

    return path, dict(open_checkpoint(path).config)


def _hub_config(name: str) -> tuple[Path, HfConfig]:
    from huggingface_hub import hf_hub_download

    from turbomill.convert.hf import read_json

    try:
        file = Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # every failure of the hub (offline, unknown, gated) is the same to the user
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CheckpointError(
            f"{name}: no such local path, and the hub did not give its config.json: {reason}; give that file"
        ) from error
    return file, read_json(file)


def weight_bytes(arch: Architecture, config: HfConfig, bits: int, group: int = 128) -> int:
    """Bytes of all weights in 16 bits, or with the layers' linears in 8 or 4 (asymmetric, by group)."""
    linears = arch.linear_shapes(config)
    biases = arch.linear_biases(config)
    total = 2 * sum(prod(shape) for shape in arch.other_weights(config).values())
    for index in range(arch.num_layers(config)):
        for fusion in arch.fusions_of(config, index):
            experts = arch.num_experts(config) if fusion.of_experts else 1
            total += experts * _fusion_bytes(fusion, linears, biases, bits, group)
    return total


def _fusion_bytes(
    fusion: Fusion, linears: dict[str, tuple[int, int]], biases: dict[str, bool], bits: int, group: int
) -> int:
    """One fused linear (of one expert)."""
    names = fusion.names()
    k, n = linears[names[0]][0], sum(linears[name][1] for name in names)
    bias = 2 * n if any(biases.get(name) for name in names) else 0
    if bits == 16:
        return 2 * n * k + bias
    rows, columns = padded(n), padded(k)
    groups = columns // stored_group(group, k)
    return rows * columns * bits // 8 + rows * groups * 2 * SCALE_BYTES + bias
