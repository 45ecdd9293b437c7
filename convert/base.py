"""A checkpoint as the project sees it: config, tensors by Hugging Face name, canonical linears."""

from __future__ import annotations

import difflib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.formats.find import find_format
from turbomill.convert.formats.packed import PackedLinear
from turbomill.convert.linear import Linear, QuantScheme
from turbomill.convert.models.base import Architecture, find_architecture
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SAMPLE_BYTES = 4096
SAMPLES = 1024
# One of them is there where a directory has a tokenizer.
TOKENIZER_PATTERNS = ("tokenizer*", "vocab*", "merges*", "spiece*", "sentencepiece*")


class Checkpoint(ABC):
    """One model on disk. Opening reads and checks headers only; tensors are mapped when asked for."""

    path: Path
    config: dict[str, Any]  # config.json, `quantization_config` included wherever it was found

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor's name."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype `tensor(name)` has, from the header."""

    @abstractmethod
    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """How the file holds a tensor: shape, dtype or block type, layout, bytes."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One tensor as stored. Raises CheckpointError when there is none."""

    def exact(self, name: str) -> Tensor:
        """One tensor in fp32, without the rounding to its dtype that `tensor` does where there are codes."""
        return self.tensor(name).float()

    @property
    def note(self) -> str:
        """What becomes of the weights when they are read, for people; empty when nothing does."""
        return ""

    def release(self) -> None:  # noqa: B027  (most have nothing to let go)
        """Let go of the memory of tensors that were looked at; what is still in use is read again."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, with its chat template."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is one; without, a model runs on token ids alone."""
        return any(any(self.path.glob(pattern)) for pattern in TOKENIZER_PATTERNS)

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json's content, or the ids config.json has."""

    @abstractmethod
    def copy_sidecars(self, dst: Path) -> None:
        """Put tokenizer, chat template, generation config and custom code into the directory `dst`."""

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that hold the tensors."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self.weight_files())

    @cached_property
    def arch(self) -> Architecture:
        """Raises UnsupportedModelError for an architecture that is not known."""
        return find_architecture(self.config)

    @cached_property
    def format(self) -> WeightFormat:
        """How the quantized linears are stored. Raises UnsupportedModelError."""
        return find_format(self.config)

    @property
    def scheme(self) -> QuantScheme | None:
        """The model's scheme; None when it is dense."""
        return self.format.scheme

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.arch.tied(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding: the model's."""
        return self.dtype_of(self.arch.embedding)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a generation."""
        value = self.generation_config().get("eos_token_id", self.config.get("eos_token_id"))
        return [int(i) for i in value] if isinstance(value, list) else [] if value is None else [int(value)]

    def format_of(self, prefix: str) -> WeightFormat:
        """The format of one linear: those a quantized model leaves alone are dense."""
        return DenseFormat() if self.has(f"{prefix}.weight") else self.format

    def scheme_of(self, prefix: str, k: int) -> QuantScheme | None:
        """The scheme of a linear of K in-features, its group resolved; None when it is dense."""
        return self.format_of(prefix).scheme_of(prefix, k)

    def linear(self, prefix: str) -> Linear:
        """A linear in canonical form; `prefix` is its full name without `.weight`."""
        return self.format_of(prefix).unpack(self, prefix)

    def packed(self, prefix: str) -> PackedLinear | None:
        """The same with its codes left in the file's words; None where `linear` is the way to read it."""
        return self.format_of(prefix).packed(self, prefix)

    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the model, unquantized. Raises UnsupportedModelError for remote code."""
        from transformers import AutoConfig

        if self.arch.remote_code:
            raise UnsupportedModelError(
                f"{self.path}: transformers has no modelling code for {self.arch.name}: the native engine "
                "runs it, but it cannot be quantized or serve as a reference"
            )

        fields = {key: value for key, value in self.config.items() if key != "quantization_config"}
        kind = fields.pop("model_type", None)
        try:
            return AutoConfig.for_model(kind, **fields)
        except Exception as error:  # transformers and huggingface_hub raise many types here
            reason = str(error).strip().replace("\n", " ")
            raise CheckpointError(
                f"{self.path}: config.json is not a valid {kind} config: {reason}"
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Names the content, not place or time: sha256 over the config and a sample of every weight file."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in self.weight_files():
            _hash_sample(digest, file)
        return digest.hexdigest()


def _hash_sample(digest: Any, file: Path) -> None:
    """The size, and up to 1024 evenly spaced blocks of 4 KiB: a small file whole, a large one's start too."""
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as handle:
        for index in range(SAMPLES):
            handle.seek(index * max(SAMPLE_BYTES, size // SAMPLES))
            block = handle.read(SAMPLE_BYTES)
            if not block:
                break
            digest.update(block)


def missing(path: Path, name: str, known: Iterable[str]) -> CheckpointError:
    """The error for a tensor that is not there, with a look-alike if there is one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return CheckpointError(f"{path}: no tensor {name}{hint}")
