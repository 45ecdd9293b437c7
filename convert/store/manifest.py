"""store.json: what it holds, and that it holds what it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from turbomill.convert.safetensors_io import DTYPES
from turbomill.convert.store.layout import BITS, DENSE, GROUP, TILE, VECTOR, W8, padded, tile_shape
from turbomill.errors import CheckpointError

FORMAT_VERSION = 3  # the newest that is known
READABLE = (1, 2, 3)
NEW_IN_2 = (".mins", ".order")  # tensors that a reader of version 1 would not miss
DTYPE_OF = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
SIZES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "intermediate_size",
)
LARGEST = 1 << 31
# What every manifest has, and of what type.
REQUIRED: dict[str, type | tuple[type, ...]] = {
    "architecture": str,
    "model": dict,
    "context_length": int,
    "dtype": str,
    "scheme": (dict, type(None)),
    "eos_token_ids": list,
    "bos_token_id": (int, type(None)),
    "tokenizer": dict,
    "tensors": dict,
    "files": dict,
    "checksums": dict,
    "hf_config": dict,
    "source": dict,
    "provenance": dict,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a store. `offset` counts from the start of the file."""

    layout: str  # vector, dense.nk, w4.n64k64, w8.n64k64, group.n64
    dtype: str  # float16, bfloat16, float32, uint8, int32
    shape: list[int]  # as stored, padded
    logical: list[int]  # [N, K] of a linear's weight, without padding; else as shape
    group: int | None  # rows of K that share a stored scale
    file: str
    offset: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """For store.json."""
        return asdict(self)


def version_for(tensors: Mapping[str, str]) -> int:
    """The oldest format version that has such tensors, name -> layout, so that old readers read what they
    can."""
    if W8 in tensors.values() or "tok_embeddings.qweight" in tensors:
        return 3
    return 2 if any(name.endswith(NEW_IN_2) for name in tensors) else 1


def dtype_name(tag: str) -> str:
    """The safetensors tag's dtype as store.json spells it: torch's name."""
    return str(DTYPES[tag]).removeprefix("torch.")


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError unless `manifest`, read from the file `path`, can be used."""
    version = manifest.get("format_version")
    if version not in READABLE:
        raise CheckpointError(
            f"{path}: format_version {version}, this turbomill reads {', '.join(map(str, READABLE))}; "
            "convert the checkpoint again or use a newer turbomill"
        )
    absent = [key for key in REQUIRED if key not in manifest]
    if absent:
        raise CheckpointError(f"{path}: {', '.join(absent)} missing; convert the checkpoint again")
    try:
        _check_types(manifest)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path}: malformed: {error}; convert the checkpoint again") from error
    tensors: dict[str, TensorInfo] = {}
    for name, info in manifest["tensors"].items():
        try:
            tensors[name] = TensorInfo(**info)
        except TypeError as error:
            raise CheckpointError(f"{path}: tensor {name}: malformed entry ({error})") from error
    for name, info in tensors.items():
        if wrong := _wrong_tensor(info, manifest["files"]) or _wrong_companion(name, tensors):
            raise CheckpointError(f"{path}: tensor {name}: {wrong}; convert the checkpoint again")


def _check_types(manifest: dict[str, Any]) -> None:
    """Raise ValueError, TypeError or LookupError unless all is of its type."""
    for key, kind in REQUIRED.items():
        if not isinstance(manifest[key], kind) or isinstance(manifest[key], bool):
            raise ValueError(f"{key} is {str(manifest[key])[:40]!r}")
    for key in SIZES:
        if not _is_count(manifest["model"][key]) or not 0 < manifest["model"][key] < LARGEST:
            raise ValueError(f"model's {key} is {str(manifest['model'][key])[:40]}")
    for key, value in manifest["model"].items():
        if not _is_plain(value):
            raise ValueError(f"model's {key} is {str(value)[:40]}")
    if manifest["dtype"] not in DTYPE_OF:
        raise ValueError(f"dtype {manifest['dtype']!r} is not known")
    files, tokenizer, scheme = manifest["files"], manifest["tokenizer"], manifest["scheme"]
    for name, size in files.items():
        if not _is_count(size) or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"file {name!r} of {size!r} bytes")
    if set(manifest["checksums"]) - set(files):
        raise ValueError("a checksum of a file that is not listed")
    if not isinstance(tokenizer["files"], list) or not isinstance(tokenizer["chat_template"], bool):
        raise ValueError(f"tokenizer is {str(tokenizer)[:40]}")
    if scheme is not None and not (_is_count(scheme["bits"]) and isinstance(scheme["symmetric"], bool)):
        raise ValueError(f"scheme is {str(scheme)[:40]}")
    if scheme is not None and not isinstance(scheme.get("mins", False), bool):
        raise ValueError(f"scheme is {str(scheme)[:40]}")
    if scheme is not None and (type(scheme["group"]) is not int or not isinstance(scheme["format"], str)):
        raise ValueError(f"scheme is {str(scheme)[:40]}")
    if not all(_is_count(token) for token in [*manifest["eos_token_ids"], manifest["bos_token_id"] or 0]):
        raise ValueError("eos_token_ids or bos_token_id are not whole numbers")


def _is_plain(value: Any) -> bool:
    """A flag, a word, a finite number of a sane size, or a list of such whole numbers."""
    if isinstance(value, list):
        return all(_is_count(item) and item < LARGEST for item in value)
    if isinstance(value, bool | str):
        return True
    return isinstance(value, int | float) and isfinite(value) and abs(value) < LARGEST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _wrong_tensor(info: TensorInfo, files: dict[str, int]) -> str:
    """What is wrong with a tensor by itself; empty when nothing is."""
    for key in ("shape", "logical"):
        sizes = getattr(info, key)
        if not isinstance(sizes, list) or not all(_is_count(size) for size in sizes) or len(sizes) > 7:
            return f"{key} {str(sizes)[:40]} is not a list of sizes"
    if not isinstance(info.dtype, str) or info.dtype not in DTYPE_OF:
        return f"dtype {str(info.dtype)[:40]} is not known"
    if info.group is not None and not (_is_count(info.group) and info.group):
        return f"group {str(info.group)[:40]} is not a whole number"
    if not _is_count(info.offset) or info.nbytes != prod(info.shape) * DTYPE_OF[info.dtype].itemsize:
        return f"{info.nbytes} bytes at {str(info.offset)[:40]} do not hold {info.dtype} {info.shape}"
    if not isinstance(info.file, str) or info.file not in files:
        return f"file {str(info.file)[:40]!r} is not listed"
    if info.offset + info.nbytes > files[info.file]:
        return f"reaches past the end of {info.file}"
    return _wrong_layout(info)


def _wrong_layout(info: TensorInfo) -> str:
    if info.layout in (VECTOR, DENSE):
        return "" if info.shape == info.logical else f"shape {info.shape} is not {info.logical}"
    if info.layout not in (*BITS, GROUP):
        return f"layout {str(info.layout)[:40]!r} is not known"
    if len(info.logical) not in (2, 3) or info.group is None or 0 in info.logical:
        return f"a packed linear of {info.logical}, group {info.group}"
    *stack, n, k = info.logical
    rows, columns = padded(n) // TILE, padded(k)
    if info.layout == GROUP:
        expected = [*stack, rows, columns // info.group, TILE]
    else:
        expected = [*stack, rows, columns // TILE, *tile_shape(BITS[info.layout])]
    if columns % info.group or info.shape != expected:
        return f"shape {info.shape}, expected {expected} for {info.logical}, group {info.group}"
    return ""


def _wrong_companion(name: str, tensors: dict[str, TensorInfo]) -> str:
    """What lacks beside a linear's codes, or does not fit them."""
    base, _, kind = name.rpartition(".")
    if kind != "qweight":
        return ""
    codes = tensors[name]
    if f"{base}.scales" not in tensors:
        return f"there is no {base}.scales"
    for other in ("scales", "zeros", "mins"):
        beside = tensors.get(f"{base}.{other}")
        if beside is not None and (beside.layout, beside.logical, beside.group) != (
            *(GROUP, codes.logical, codes.group),
        ):
            return f"{base}.{other} is {beside.layout} {beside.logical}, group {beside.group}"
        if beside is not None and beside.dtype not in ("float16", "bfloat16"):
            return f"{base}.{other} is {beside.dtype}"
    order, bias = tensors.get(f"{base}.order"), tensors.get(f"{base}.bias")
    if order is not None and (order.dtype, order.shape) != ("int32", codes.logical[-1:]):
        return f"{base}.order is {order.dtype} {order.shape}"
    return f"{base}.bias is {bias.shape}" if bias is not None and bias.shape != codes.logical[-2:-1] else ""
