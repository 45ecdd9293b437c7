"""Hugging Face directories: config.json, safetensors (one file, shards with an index, or loose shards)."""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint, missing
from turbomill.convert.safetensors_io import DTYPES, Entry, map_file, read_header, view
from turbomill.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX = "model.safetensors.index.json"
QUANT_SIDECARS = ("quantize_config.json", "quant_config.json")  # GPTQ's, AutoAWQ's
REWRITTEN = ("config.json", INDEX, *QUANT_SIDECARS)  # written anew with the weights, never copied
SIDECARS = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a CheckpointError that says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def copy_sidecars(src: Path, dst: Path) -> None:
    """Copy a checkpoint's small files, untouched: everything but weights and what describes them."""
    dst.mkdir(parents=True, exist_ok=True)
    for pattern in SIDECARS:
        for file in src.glob(pattern):
            if file.is_file() and file.name not in REWRITTEN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, dst / file.name)
    templates = src / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, dst / templates.name, dirs_exist_ok=True)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory. Raises CheckpointError when its files are missing or broken."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises many types here
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {reason}") from error


class HfCheckpoint(Checkpoint):
    """A directory with config.json and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        for sidecar in QUANT_SIDECARS:
            if not self.config.get("quantization_config") and (path / sidecar).is_file():
                self.config["quantization_config"] = read_json(path / sidecar)
        self._open_weights()

    def _open_weights(self) -> None:
        path = self.path
        self._where: dict[str, tuple[Path, Entry]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        index = _index(path)
        self._files = _weight_files(path, index)
        for file in self._files:
            for name, entry in read_header(file).items():
                if name in self._where:
                    other = self._where[name][0].name
                    raise CheckpointError(
                        f"{file}: tensor {name} is also in {other}; remove one of the two files"
                    )
                self._where[name] = (file, entry)
        for name, shard in index.items():
            if name not in self._where or self._where[name][0].name != shard:
                raise CheckpointError(
                    f"{path / shard}: tensor {name}, which {INDEX} places here, is not in it"
                )

    def weight_files(self) -> list[Path]:
        """In order of name."""
        return self._files

    def names(self) -> list[str]:
        """Every tensor's name, shard by shard."""
        return list(self._where)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._where

    def _find(self, name: str) -> tuple[Path, Entry]:
        if name not in self._where:
            raise missing(self.path, name, self._where)
        return self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return self._find(name)[1].shape

    def dtype_of(self, name: str) -> torch.dtype:
        """From the header."""
        return DTYPES[self._find(name)[1].dtype]

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """From the header; row-major."""
        entry = self._find(name)[1]
        return entry.shape, str(DTYPES[entry.dtype]).removeprefix("torch."), "row-major", entry.nbytes

    def tensor(self, name: str) -> Tensor:
        """Mapped from the file; do not write into it."""
        file, entry = self._find(name)
        if file not in self._maps:
            self._maps[file] = map_file(file)
        return view(self._maps[file], DTYPES[entry.dtype], entry.shape, entry.offset)

    def release(self) -> None:
        """Drop the mapped pages: they stay in the system's cache, and no longer count as this process's."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """From the directory."""
        return load_tokenizer(self.path)

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json if there is one, else the special ids of config.json."""
        file = self.path / "generation_config.json"
        if file.is_file():
            return read_json(file)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {key: self.config[key] for key in keys if self.config.get(key) is not None}

    def copy_sidecars(self, dst: Path) -> None:
        """Byte by byte."""
        copy_sidecars(self.path, dst)


def _index(path: Path) -> dict[str, str]:
    """Tensor -> shard from the index; empty without one, or beside a single model.safetensors."""
    file = path / INDEX
    if (path / "model.safetensors").is_file() or not file.is_file():
        return {}
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file}: no weight_map of tensor names to file names")
    return weight_map


def _weight_files(path: Path, index: dict[str, str]) -> list[Path]:
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index:
        files = [path / shard for shard in sorted(set(index.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: missing, though {INDEX} names it; download it again")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        other = next((f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth")), None)
        found = "none found; give a directory with safetensors files"
        if other:
            found = f"only {other}: save the model as safetensors, or convert it with --allow-pickle"
        raise CheckpointError(f"{path}: needs *.safetensors weights: {found}")
    return files
