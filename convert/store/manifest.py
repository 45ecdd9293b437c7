"""store.json: what it holds, and that it holds what it should."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turbomill.convert.safetensors_io import DTYPES
from turbomill.errors import CheckpointError

FORMAT_VERSION = 2  # the newest that is known
READABLE = (1, 2)
NEW_IN_2 = (".mins", ".order")  # tensors that a reader of version 1 would not miss
REQUIRED = ("architecture", "model", "context_length", "dtype", "scheme", "tensors", "files", "checksums")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a store. `offset` counts from the start of the file."""

    layout: str  # vector, dense.nk, w4.n64k64, group.n64
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


def version_for(tensors: Iterable[str]) -> int:
    """The oldest format version that has such tensors, so that old readers read what they can."""
    return 2 if any(name.endswith(NEW_IN_2) for name in tensors) else 1


def dtype_name(tag: str) -> str:
    """The safetensors tag's dtype as store.json spells it: torch's name."""
    return str(DTYPES[tag]).removeprefix("torch.")


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError unless `manifest`, read from the file `path`, can be used."""
    version = manifest.get("format_version")
    if version not in READABLE:
        raise CheckpointError(
            f"{path}: format_version {version}, this turbomill reads {' and '.join(map(str, READABLE))}; "
            "convert the checkpoint again or use a newer turbomill"
        )
    absent = [key for key in REQUIRED if key not in manifest]
    if absent:
        raise CheckpointError(f"{path}: {', '.join(absent)} missing; convert the checkpoint again")
    for name, info in manifest["tensors"].items():
        try:
            TensorInfo(**info)
        except TypeError as error:
            raise CheckpointError(f"{path}: tensor {name}: malformed entry ({error})") from error
