"""Opens stores: the manifest, where each tensor lies, and the way back to canonical linears."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbomill.convert.hf import load_tokenizer, read_json
from turbomill.convert.linear import DenseLinear, Linear, QuantLinear, QuantScheme
from turbomill.convert.safetensors_io import map_file, view
from turbomill.convert.source import STORE_FILE
from turbomill.convert.store.layout import BITS, unpack_codes, unpack_groups
from turbomill.convert.store.manifest import check_manifest
from turbomill.convert.store.writer import checksum
from turbomill.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class StoreTensor:
    """Where one tensor's bytes are and how to read them; the arguments of turbomill._core.TensorRef."""

    name: str
    layout: str
    dtype: str  # float16, bfloat16, float32, uint8
    shape: tuple[int, ...]  # as stored
    logical: tuple[int, ...]  # [N, K] of a linear's weight, without padding
    group: int | None
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoredGrid:
    """Scales, and zeros or minima, [G, N] of a fused linear, in the stored group."""

    scales: Tensor
    zeros: Tensor
    mins: Tensor | None
    scheme: QuantScheme


@dataclass(frozen=True)
class Store:
    """An open store: checked, nothing loaded."""

    path: Path
    manifest: dict[str, Any]

    @property
    def model(self) -> dict[str, Any]:
        """The fields of turbomill._core.ModelConfig."""
        return self.manifest["model"]

    @property
    def context_length(self) -> int:
        """Tokens the model was made for."""
        return self.manifest["context_length"]

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a generation."""
        return self.manifest["eos_token_ids"]

    @property
    def bos_token_id(self) -> int | None:
        """The id a text begins with, if the model has one."""
        return self.manifest["bos_token_id"]

    @property
    def scheme(self) -> QuantScheme | None:
        """The quantized linears' scheme; None when all are dense."""
        scheme = self.manifest["scheme"]
        return scheme and QuantScheme(
            scheme["bits"], scheme["group"], scheme["symmetric"], scheme.get("mins", False)
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes of the weight shards."""
        return sum(n for name, n in self.manifest["files"].items() if name.endswith(".safetensors"))

    @cached_property
    def tensors(self) -> dict[str, StoreTensor]:
        """Every tensor by name."""
        return {
            name: StoreTensor(
                name=name,
                layout=info["layout"],
                dtype=info["dtype"],
                shape=tuple(info["shape"]),
                logical=tuple(info["logical"]),
                group=info["group"],
                path=self.path / info["file"],
                offset=info["offset"],
                nbytes=info["nbytes"],
            )
            for name, info in self.manifest["tensors"].items()
        }

    @cached_property
    def fingerprint(self) -> str:
        """Names the content: sha256 over the model's sizes and the checksums of its files."""
        content = {key: self.manifest[key] for key in ("model", "scheme", "checksums")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the (unquantized) model."""
        from transformers import AutoConfig

        fields = dict(self.manifest["hf_config"])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template. Raises CheckpointError when the store has none."""
        if not self.manifest["tokenizer"]["files"]:
            raise CheckpointError(
                f"{self.path}: this store has no tokenizer; put it beside the checkpoint, convert"
            )
        return load_tokenizer(self.path)

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored shape, mapped from the file."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        found = self.tensors[name]
        return view(map_file(found.path), getattr(torch, found.dtype), found.shape, found.offset)

    def linear(self, name: str, expert: int | None = None) -> Linear:
        """A fused linear, e.g. `layers.0.w_qkv`, back in canonical form; its group is the stored one.

        `expert` chooses one of a stacked linear, e.g. `layers.0.experts.w_down`.
        """

        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self.tensors else None
        grid = self.grid(name, expert)
        if grid is None:
            return DenseLinear(self._part(f"{name}.weight", expert), bias)
        n, k = self.tensors[f"{name}.qweight"].logical[-2:]
        codes = unpack_codes(self._part(f"{name}.qweight", expert), grid.scheme.bits, k, n)
        order = self.tensor(f"{name}.order") if f"{name}.order" in self.tensors else None
        return QuantLinear(codes, grid.scales, grid.zeros, grid.scheme, bias, grid.mins, order)

    def grid(self, name: str, expert: int | None = None) -> StoredGrid | None:
        """A fused linear without its codes; None when it is dense."""
        if f"{name}.qweight" not in self.tensors:
            return None
        info = self.tensors[f"{name}.qweight"]
        (n, k), group = info.logical[-2:], info.group or 0
        bits = BITS[info.layout]
        scales = unpack_groups(self._part(f"{name}.scales", expert), group, k, n)
        with_zeros, with_mins = f"{name}.zeros" in self.tensors, f"{name}.mins" in self.tensors
        zero = 0 if with_mins else 2 ** (bits - 1)
        zeros, mins = torch.full(scales.shape, zero, dtype=torch.uint8), None
        if with_mins:
            mins = unpack_groups(self._part(f"{name}.mins", expert), group, k, n)
        elif with_zeros:
            zeros = unpack_groups(self._part(f"{name}.zeros", expert), group, k, n).to(torch.uint8)
        scheme = QuantScheme(bits, group, not (with_zeros or with_mins), with_mins)
        return StoredGrid(scales, zeros, mins, scheme)

    def _part(self, name: str, expert: int | None) -> Tensor:
        found = self.tensor(name)
        return found if expert is None else found[expert]

    def verify(self) -> Sequence[str]:
        """Names of files whose checksum is not the recorded one; reads everything."""
        return [
            name for name, value in self.manifest["checksums"].items() if checksum(self.path / name) != value
        ]


def open_store(path: str | Path) -> Store:
    """Open a store directory. Raises CheckpointError when it is incomplete, damaged or of another version."""
    path = Path(path).expanduser().absolute()
    manifest_path = path / STORE_FILE
    if not manifest_path.is_file():
        hint = "a half-written or partial copy; convert again" if path.is_dir() else "no such directory"
        raise CheckpointError(f"{manifest_path}: missing: {hint}")
    manifest = read_json(manifest_path)
    check_manifest(manifest_path, manifest)
    for name, size in manifest["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes, expected {size}"
            raise CheckpointError(f"{file}: {state}; copy the store again or convert the checkpoint again")
    return Store(path, manifest)
