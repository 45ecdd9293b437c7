"""Checkpoint to store: read headers, check everything, write, and let the result appear whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.convert.checkpoint import Checkpoint, open_checkpoint, open_dense
from turbomill.convert.source import STORE_FILE
from turbomill.convert.staged import StagedDirectory, require_space
from turbomill.convert.store.check import check_tensors
from turbomill.convert.store.manifest import TensorInfo, version_for
from turbomill.convert.store.plan import plan_store
from turbomill.convert.store.reader import Store, open_store
from turbomill.convert.store.writer import SHARD_BYTES, checksum, write_shards
from turbomill.convert.writer import write_json
from turbomill.errors import UsageError

log = logging.getLogger("turbomill.convert")


def convert_checkpoint(
    model: str | Path,
    dst: Path,
    *,
    force: bool = False,
    dense: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Store:
    """Write MODEL as a store at `dst`. Nothing is written unless the whole checkpoint is sound.

    `dense` dequantizes what a GGUF file holds in 4 bits, as though it were a full-precision model.
    Raises UsageError when `dst` exists (unless it is a store and `force`), CheckpointError and
    UnsupportedModelError for the checkpoint.
    """
    dst = Path(dst).expanduser().absolute()
    checkpoint = open_dense(model) if dense else open_checkpoint(model)
    check_destination(dst, checkpoint.path, force)
    check_tensors(checkpoint)
    steps = plan_store(checkpoint)
    total = sum(planned.nbytes for step in steps for planned in step.tensors)
    require_space(dst, total)
    with StagedDirectory(dst) as temp:
        checkpoint.copy_sidecars(temp)
        with console.progress("convert (KiB)", -(-total // 1024)) as task:
            written = 0

            def done(nbytes: int) -> None:
                nonlocal written
                before, written = written, written + nbytes
                task.advance(-(-written // 1024) - -(-before // 1024))

            tensors = write_shards(temp, steps, done, shard_bytes)
        write_json(temp / STORE_FILE, _manifest(checkpoint, tensors, temp))
    return open_store(dst)


def check_destination(
    dst: Path, source: Path, force: bool, marker: str = STORE_FILE, what: str = "a store"
) -> None:
    """Only what has the file `marker` may be replaced, and only when asked to; never the source."""
    if dst == source or dst in source.parents or source in dst.parents:
        raise UsageError(f"{dst}: lies in the checkpoint, or the checkpoint in it; choose another --dst-path")
    if not dst.exists():
        return
    if dst.is_dir() and not any(dst.iterdir()):
        return
    if not (dst / marker).is_file():
        raise UsageError(f"{dst}: exists and is not {what}; choose another --dst-path")
    if not force:
        raise UsageError(f"{dst}: exists; give --force to replace it, or another --dst-path")


def _manifest(checkpoint: Checkpoint, tensors: dict[str, TensorInfo], directory: Path) -> dict[str, Any]:
    config, scheme = checkpoint.config, checkpoint.scheme
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    return {
        "format_version": version_for(tensors),
        "architecture": checkpoint.arch.name,
        "model": checkpoint.arch.model_config(config),
        "context_length": int(config.get("max_position_embeddings", 2048)),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "scheme": scheme
        and {
            "format": checkpoint.format.name,
            "bits": scheme.bits,
            "group": scheme.group,
            "symmetric": scheme.symmetric,
        },
        "eos_token_ids": checkpoint.eos_token_ids,
        "bos_token_id": checkpoint.generation_config().get("bos_token_id", config.get("bos_token_id")),
        "tokenizer": _tokenizer_info(directory),
        "hf_config": {key: value for key, value in config.items() if key != "quantization_config"},
        "source": {"path": str(checkpoint.path), "fingerprint": checkpoint.fingerprint},
        "provenance": console.provenance(),
        "tensors": {name: info.to_dict() for name, info in tensors.items()},
        "files": sizes,
        "checksums": {name: checksum(directory / name) for name in sizes},
    }


def _tokenizer_info(directory: Path) -> dict[str, Any]:
    """Which tokenizer files came along; a model without any can still be run on token ids."""
    names = sorted(
        path.name for path in directory.iterdir() if path.name.startswith(("tokenizer", "vocab", "merges"))
    )
    template = (directory / "chat_template.jinja").is_file() or any(
        '"chat_template"' in (directory / name).read_text(encoding="utf-8")
        for name in ("tokenizer_config.json", "chat_template.json")
        if (directory / name).is_file()
    )
    if not names:
        log.warning("no tokenizer beside the checkpoint: the store will run on token ids only")
    return {"files": names, "chat_template": template}
