"""A GGUF file, or the first of several it was split into, read as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import mmap
import re
import shutil
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint, missing
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.formats.gguf import GgufFormat
from turbomill.convert.gguf.blocks import SCHEMES, values_of
from turbomill.convert.gguf.container import GgufTensor
from turbomill.convert.gguf.metadata import Metadata
from turbomill.convert.gguf.models import GLOBAL_NAMES, config_of, find_model
from turbomill.convert.gguf.part import Part
from turbomill.convert.gguf.rope import FACTORS
from turbomill.convert.gguf.split import joined, read_all
from turbomill.convert.hf import load_tokenizer
from turbomill.convert.wrapped import WrappedCheckpoint
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
ONE_EXPERT = re.compile(r"(ffn_\w+)\.(\d+)")  # of files from before experts were stacked
# Beginnings of the names of a tokenizer's files.
TOKENIZER_FILES = ("tokenizer", "chat_template", "special_tokens", "added_tokens", "vocab.", "merges.")


class GgufCheckpoint(Checkpoint):
    """Tensors have Hugging Face names and are dequantized when asked for; 4-bit linears keep their codes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = read_all(path)
        first, tensors = self._files[0], joined(self._files)
        self._fields = first.fields
        arch = first.fields.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(
                f"{path}: metadata general.architecture is missing; the file is not a complete model"
            )
        self._meta = Metadata(path, arch, first.fields, {name: t.shape for name, t in tensors.items()})
        self._model = find_model(self._meta)
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{path}: no tensor token_embd.weight; the file is not a complete model")
        factors = {name: _floats(tensors[name]) for name in FACTORS if name in tensors}
        self._parts: dict[str, Part] = {}
        for name, tensor in tensors.items():
            if name not in FACTORS:
                self._parts |= self._named(tensor)
        self._dtype = _model_dtype(tensors.values())
        vocab, tied = tensors["token_embd.weight"].shape[0], "output.weight" not in tensors
        ids = {
            f"{key}_token_id": first.fields.get(f"tokenizer.ggml.{name}_token_id")
            for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        self.config = config_of(self._meta, self._model, factors, vocab, tied) | {
            "dtype": str(self._dtype).removeprefix("torch."),
            "pad_token_id": None,  # some architectures have a default of their own, beyond a small vocabulary
            **{key: value for key, value in ids.items() if value is not None},
        }
        self._tokenizer: PreTrainedTokenizerBase | None = None  # slow to read, so kept

    @property
    def note(self) -> str:
        """Which block types lose their form: all but those of linears with codes."""
        tables = [name.removesuffix(".weight") for name in (self.arch.embedding, self.arch.head)]
        linears = [*self.arch.linear_prefixes(self.config), *tables]
        return self.lost({f"{prefix}.weight" for prefix in linears if self.format_of(prefix).scheme})

    def lost(self, kept: set[str]) -> str:
        """Which block types do when the tensors `kept` keep theirs; 16 and 32 bits are no blocks."""
        kinds = {part.tensor.kind for name, part in self._parts.items() if name not in kept}
        blocks = ", ".join(sorted(kinds - {"F32", "F16", "BF16"}))
        return f"{blocks} dequantized to {str(self._dtype).removeprefix('torch.')}" if blocks else ""

    def _named(self, tensor: GgufTensor) -> dict[str, Part]:
        """A file's tensor under its Hugging Face name or names; one that is not known keeps its own."""
        base, _, suffix = tensor.name.rpartition(".")
        offset = self._model.norm_offset if base.endswith("norm") else 0.0
        if base in GLOBAL_NAMES:
            return {f"{GLOBAL_NAMES[base]}.{suffix}": Part(tensor, offset=offset)}
        match = LAYER_NAME.fullmatch(tensor.name)
        if match is None:
            return {tensor.name: Part(tensor)}
        layer, part, _ = match.groups()
        prefix, model = f"model.layers.{layer}.", self._model
        single = ONE_EXPERT.fullmatch(part)
        if single and f"{single[1]}_exps" in model.experts:
            name = model.experts[f"{single[1]}_exps"].format(e=single[2])
            return {f"{prefix}{name}.{suffix}": Part(tensor)}
        if part in model.experts:
            if len(tensor.shape) != 3:
                raise CheckpointError(f"{self.path}: tensor {tensor.name}: expected experts, [E, N, K]")
            return {
                f"{prefix}{model.experts[part].format(e=e)}.{suffix}": Part(tensor, expert=e)
                for e in range(tensor.shape[0])
            }
        heads, kv_heads, dim = self._meta.heads
        if part == "attn_qkv" and model.split_qkv:
            if tensor.shape[0] != (heads + 2 * kv_heads) * dim:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name}: {tensor.shape[0]} rows of q, k and v"
                )
            cuts = [0, heads * dim, (heads + kv_heads) * dim, tensor.shape[0]]
            names = [f"{prefix}{model.names[f'attn_{x}']}.{suffix}" for x in "qkv"]
            return {name: Part(tensor, rows=slice(*cuts[i : i + 2])) for i, name in enumerate(names)}
        if part not in model.names:
            return {tensor.name: Part(tensor)}
        turned = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0) if model.interleaved else 0
        if turned and (tensor.shape[0] % (2 * turned) or len(tensor.shape) > 2):
            raise CheckpointError(f"{self.path}: tensor {tensor.name}: {tensor.shape} for {turned} heads")
        vector = part == "ffn_gate_inp_shexp"
        return {f"{prefix}{model.names[part]}.{suffix}": Part(tensor, None, None, turned, offset, vector)}

    @cached_property
    def format(self) -> WeightFormat:
        """Of the linears with codes, the commonest scheme; dense when none has."""
        linears = (f"{prefix}.weight" for prefix in self.arch.linear_prefixes(self.config))
        kinds = Counter(self._parts[name].tensor.kind for name in linears if name in self._parts)
        schemes = [(count, kind) for kind, count in kinds.items() if kind in SCHEMES]
        return GgufFormat(SCHEMES[max(schemes)[1]]) if schemes else DenseFormat()

    def format_of(self, prefix: str) -> WeightFormat:
        """Q4_0, Q4_1 and Q8_0 keep their codes; the rest is dense."""
        part = self._parts.get(f"{prefix}.weight")
        if part is None or len(part.shape) != 2 or part.tensor.kind not in SCHEMES:
            return DenseFormat()
        return GgufFormat(SCHEMES[part.tensor.kind])

    def exact(self, name: str) -> Tensor:
        """What the blocks stand for, where they are kept as codes."""
        prefix = name.removesuffix(".weight")
        coded = self.format_of(prefix).scheme is not None
        return self.linear(prefix).dequantize() if coded else super().exact(name)

    def blocks(self, name: str) -> tuple[np.ndarray, str]:
        """A tensor's rows of bytes in Hugging Face's order, and their block type."""
        part = self._find(name)
        return part.bytes(), part.tensor.kind

    def weight_files(self) -> list[Path]:
        """The file itself, and those it was split into."""
        return [file.path for file in self._files]

    def names(self) -> list[str]:
        """Hugging Face names."""
        return list(self._parts)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name."""
        return name in self._parts

    def _find(self, name: str) -> Part:
        if name not in self._parts:
            raise missing(self.path, name, self._parts)
        return self._parts[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major: GGUF lists the fastest dimension first."""
        return self._find(name).shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Always the model's: fp16, or bf16 or fp32 where the matrices are."""
        self._find(name)
        return self._dtype

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """The block type stands for the dtype."""
        part = self._find(name)
        whole = part.tensor.shape[0] if part.tensor.shape else 1
        share = 1 if part.expert is None and part.rows is None else part.shape[0]
        nbytes = part.tensor.nbytes
        if part.expert is not None:
            nbytes //= whole
        elif part.rows is not None:
            nbytes = nbytes * share // whole
        return part.shape, part.tensor.kind, "gguf", nbytes

    def tensor(self, name: str) -> Tensor:
        """In the model's dtype and Hugging Face's row order. Raises CheckpointError on overflow."""
        part = self._find(name)
        try:
            values = values_of(part.bytes(), part.tensor.kind).reshape(part.shape) - part.offset
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {part.tensor.name}: type {part.tensor.kind} cannot be read"
            ) from error
        if values.numel() and not bool(values.abs().max() <= torch.finfo(self._dtype).max):  # NaN: also false
            raise CheckpointError(
                f"{self.path}: tensor {part.tensor.name}: holds values beyond {self._dtype}"
            )
        return values.to(self._dtype).contiguous()

    def release(self) -> None:
        """Drop the mapped pages: they stay in the system's cache, and no longer count as this process's."""
        for file in self._files:
            file.data.madvise(mmap.MADV_DONTNEED)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Files beside the model, or else transformers' reading of the metadata."""
        if self._tokenizer is not None:
            return self._tokenizer
        if self._has_tokenizer_files():
            self._tokenizer = load_tokenizer(self.path.parent)
            return self._tokenizer
        if "tokenizer.ggml.model" not in self._fields:
            raise CheckpointError(
                f"{self.path}: has no tokenizer; put the model's tokenizer.json and tokenizer_config.json "
                "beside the file"
            )
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except Exception as error:  # transformers raises many types here
            reason = str(error).strip().split("\n", 1)[0]
            raise CheckpointError(
                f"{self.path}: the tokenizer cannot be read: {reason}; "
                "put the model's tokenizer.json and tokenizer_config.json beside the file"
            ) from error
        self._tokenizer = found
        return found

    @property
    def has_tokenizer(self) -> bool:
        """In the file, or in files beside it."""
        return self._has_tokenizer_files() or "tokenizer.ggml.model" in self._fields

    def _has_tokenizer_files(self) -> bool:
        return all(
            (self.path.parent / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
        )

    def generation_config(self) -> dict[str, Any]:
        """Special ids; end-of-turn and end-of-message tokens end a generation too."""
        names = ("eos", "eot", "eom")
        found = [self._fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        eos = list(dict.fromkeys(value for value in found if value is not None))
        own = {key: self.config.get(key) for key in ("bos_token_id", "pad_token_id")}
        ids = {key: value for key, value in own.items() if value is not None}
        return {**ids, "eos_token_id": eos} if eos else ids

    def copy_sidecars(self, dst: Path) -> None:
        """Tokenizer files, chat template and generation config: those beside the file, or made from it."""
        dst.mkdir(parents=True, exist_ok=True)
        if self._has_tokenizer_files():
            for file in self.path.parent.iterdir():
                if file.is_file() and file.name.startswith(TOKENIZER_FILES):
                    shutil.copyfile(file, dst / file.name)
        elif "tokenizer.ggml.model" in self._fields:
            self.tokenizer().save_pretrained(str(dst))
        text = json.dumps(self.generation_config(), indent=2) + "\n"
        (dst / "generation_config.json").write_text(text, encoding="utf-8")


class DequantizedGguf(WrappedCheckpoint):
    """A GGUF file without codes: every linear is the 16-bit numbers that it stands for."""

    def __init__(self, source: GgufCheckpoint) -> None:
        super().__init__(source)
        self._note = source.lost(set())

    @property
    def note(self) -> str:
        """Every block type."""
        return self._note


def _floats(tensor: GgufTensor) -> Tensor:
    if tensor.kind != "F32":
        raise CheckpointError(f"{tensor.file.path}: tensor {tensor.name}: {tensor.kind}, expected F32")
    return values_of(tensor.rows(), tensor.kind).reshape(tensor.shape)


def _model_dtype(tensors: Any) -> torch.dtype:
    """fp16 unless every matrix is bf16 or fp32."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.bfloat16 if kinds and kinds <= {"BF16", "F32"} else torch.float16
