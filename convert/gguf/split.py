"""Models that were split over several GGUF files (llama.cpp's gguf-split): the first has the metadata."""

from __future__ import annotations

import re
from pathlib import Path

from turbomill.convert.gguf.container import GgufFile, GgufTensor, read_gguf
from turbomill.errors import CheckpointError


def read_all(path: Path) -> list[GgufFile]:
    """The file and, if it is the first of several, the others. Raises CheckpointError for one that is not."""
    first = read_gguf(path)
    return [first, *_others(first)]


def _others(first: GgufFile) -> list[GgufFile]:
    """The other files of a model that was split: NAME-00001-of-00003.gguf and so on."""
    count = first.fields.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return []
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", first.path.name)
    if match is None or int(match[2]) != count or first.fields.get("split.no", 0) != 0:
        raise CheckpointError(
            f"{first.path}: one of {count} files of a split model; give the first, "
            f"NAME-00001-of-{count:05d}.gguf"
        )
    paths = [first.path.with_name(f"{match[1]}-{i + 1:05d}-of-{match[2]}.gguf") for i in range(1, count)]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though {first.path.name} needs it; download it again")
    return [read_gguf(path) for path in paths]


def joined(files: list[GgufFile]) -> dict[str, GgufTensor]:
    """All the files' tensors. Raises CheckpointError for one that is in two."""
    found: dict[str, GgufTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in found:
                raise CheckpointError(f"{file.path}: tensor {name} is also in {found[name].file.path.name}")
            found[name] = tensor
    return found
