"""Checkpoint to store: read headers, check everything, write, and let the result appear whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.convert.checkpoint import Checkpoint, open_checkpoint, open_dense
from turbomill.convert.hf import read_json
from turbomill.convert.padded import PaddedCheckpoint, padded_sizes
from turbomill.convert.source import STORE_FILE
from turbomill.convert.staged import StagedDirectory, require_space
from turbomill.convert.store.check import check_tensors
from turbomill.convert.store.manifest import TensorInfo, version_for
from turbomill.convert.store.plan import Step, plan_store
from turbomill.convert.store.reader import Store, open_store
from turbomill.convert.store.slices import SIZES, fitting_sizes, padded_multiple, problems
from turbomill.convert.store.writer import SHARD_BYTES, checksum, write_shards
from turbomill.convert.writer import write_json
from turbomill.errors import UsageError

log = logging.getLogger("turbomill.convert")

RELEASE_BYTES = 1 << 28  # written, after which the source's pages no longer count as this process's


def convert_checkpoint(
    model: str | Path,
    dst: Path,
    *,
    force: bool = False,
    dense: bool = False,
    allow_pickle: bool = False,
    pad_tp: int = 1,
    shard_bytes: int = SHARD_BYTES,
) -> Store:
    """Write MODEL as a store at `dst`. Nothing is written unless the whole checkpoint is sound.

    `dense` dequantizes what a GGUF file holds in 4 bits, as though it were a full-precision model;
    `allow_pickle` reads pytorch_model.bin. `pad_tp` pads MLPs with zeros, where that is needed for the store
    to split over so many tensor parallel ranks.
    Raises UsageError when `dst` exists (unless it is a store and `force`) and for ranks that the heads do not
    split over, CheckpointError and UnsupportedModelError for the checkpoint.
    """
    dst = Path(dst).expanduser().absolute()
    checkpoint = (open_dense if dense else open_checkpoint)(model, allow_pickle)
    check_destination(dst, checkpoint.path, force)
    check_tensors(checkpoint)
    steps = plan_store(checkpoint)
    if pad_tp > 1:
        checkpoint, steps = _splitting(checkpoint, steps, pad_tp)
    _log_tp(checkpoint, steps)
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
                if written // RELEASE_BYTES > before // RELEASE_BYTES:
                    checkpoint.release()  # what is being read comes back from the system's cache

            tensors, sums = write_shards(temp, steps, done, shard_bytes)
        write_json(temp / STORE_FILE, _manifest(checkpoint, tensors, sums, temp))
    return open_store(dst)


def _splitting(checkpoint: Checkpoint, steps: list[Step], tp: int) -> tuple[Checkpoint, list[Step]]:
    """The checkpoint, padded if it must be, and its plan, so that the store splits in `tp`."""
    model = checkpoint.arch.model_config(checkpoint.config)
    tensors = [planned for step in steps for planned in step.tensors]
    if not problems(model, tensors, tp):
        return checkpoint, steps
    sizes = padded_sizes(checkpoint.config, padded_multiple(model, tensors, tp))
    for key, size in sizes.items():
        log.info("%s: %d is padded to %d with zeros", key, checkpoint.config[key], size)
    padded = PaddedCheckpoint(checkpoint, sizes)
    steps = plan_store(padded)
    model, tensors = padded.arch.model_config(padded.config), [t for step in steps for t in step.tensors]
    wrong = problems(model, tensors, tp)
    if wrong:
        works = ", ".join(map(str, fitting_sizes(model, tensors)))
        raise UsageError(f"--pad-tp {tp}: {wrong[0]}, and no padding of MLPs helps; tp that work: {works}")
    return padded, steps


def _log_tp(checkpoint: Checkpoint, steps: list[Step]) -> None:
    """Say which numbers of ranks the store splits over, and why not the next."""
    model = checkpoint.arch.model_config(checkpoint.config)
    tensors = [planned for step in steps for planned in step.tensors]
    works = fitting_sizes(model, tensors)
    other = next((tp for tp in SIZES if tp not in works), None)
    why = ""
    if other is not None:
        wrong = problems(model, tensors, other)
        hint = f" (--pad-tp {other} pads)" if wrong[0].split(":")[0].endswith(("w_down", "w_gate_up")) else ""
        why = f"; not {other}: {'; '.join(wrong)}{hint}"
    log.info("tensor parallel ranks that can share this store: %s%s", ", ".join(map(str, works)), why)


def check_destination(
    dst: Path, source: Path, force: bool, marker: str = STORE_FILE, what: str = "a store"
) -> None:
    """Only what has the file `marker` may be replaced, and only when asked to; never the source."""
    here = dst.resolve()
    if here == source or here in source.parents or source in here.parents:
        raise UsageError(f"{dst}: lies in the checkpoint, or the checkpoint in it; choose another --dst-path")
    if not dst.exists():
        return
    if dst.is_dir() and not any(dst.iterdir()):
        return
    if not (dst / marker).is_file():
        raise UsageError(f"{dst}: exists and is not {what}; choose another --dst-path")
    if not force:
        raise UsageError(f"{dst}: exists; give --force to replace it, or another --dst-path")


def _manifest(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], sums: dict[str, str], directory: Path
) -> dict[str, Any]:
    config, scheme = checkpoint.config, checkpoint.scheme
    source: dict[str, Any] = {"path": str(checkpoint.path), "fingerprint": checkpoint.fingerprint}
    if checkpoint.note:
        source["note"] = checkpoint.note
    if isinstance(checkpoint, PaddedCheckpoint):
        source["padded"] = checkpoint.sizes
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    return {
        "format_version": version_for({name: info.layout for name, info in tensors.items()}),
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
            **({"mins": True} if scheme.mins else {}),
        },
        "eos_token_ids": checkpoint.eos_token_ids,
        "bos_token_id": checkpoint.generation_config().get("bos_token_id", config.get("bos_token_id")),
        "tokenizer": _tokenizer_info(directory, int(config["vocab_size"])),
        "hf_config": {key: value for key, value in config.items() if key != "quantization_config"},
        "source": source,
        "provenance": console.provenance(),
        "tensors": {name: info.to_dict() for name, info in tensors.items()},
        "files": sizes,
        "checksums": {name: sums.get(name) or checksum(directory / name) for name in sizes},
    }


def _tokenizer_info(directory: Path, rows: int) -> dict[str, Any]:
    """Which tokenizer files came along; a model without any can still be run on token ids."""
    names = sorted(
        path.name for path in directory.iterdir() if path.name.startswith(("tokenizer", "vocab", "merges"))
    )
    template = (directory / "chat_template.jinja").is_file() or any(
        read_json(directory / name).get("chat_template")
        for name in ("tokenizer_config.json", "chat_template.json")
        if (directory / name).is_file()
    )
    if not names:
        log.warning("no tokenizer beside the checkpoint: the store will run on token ids only")
    ids = _token_ids(directory)
    if ids > rows:
        log.warning(
            "the tokenizer has ids up to %d, the embedding has %d rows: texts with tokens beyond are refused",
            *(ids - 1, rows),
        )
    return {"files": names, "chat_template": bool(template)}


def _token_ids(directory: Path) -> int:
    """One more than the largest id of tokenizer.json; 0 without one, or when it is of another form."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return 0
    found = read_json(file)
    try:
        vocab = found["model"]["vocab"]  # id by token, or a list with scores
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [token["id"] for token in found.get("added_tokens") or []]
        return max(ids, default=-1) + 1
    except (KeyError, TypeError):
        return 0
