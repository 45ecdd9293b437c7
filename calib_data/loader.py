"""One name, one set of windows: what every command's `--calib-dataset` understands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill.calib_data import builtin, hub
from turbomill.calib_data.files import read_path
from turbomill.calib_data.sampling import OPENING, PIECE, sample_ids
from turbomill.calib_data.windows import Windows, fingerprint, windows
from turbomill.errors import TurbomillError, UsageError

SPLITS = builtin.SPLITS
# What the model writes itself: after openings of the built-in text, or after nothing.
OWN = ("self", "free")
OWN_BATCH = 64  # pieces of `self` that are written together: they are short
# Hub sets are endless for our purpose: stop once there is comfortably more text than the windows need.
HUB_CHARACTERS_PER_TOKEN = 8


def known_names() -> list[str]:
    """The names `--calib-dataset` takes beside a path."""
    return ["builtin", *OWN, *hub.HUB_SETS]


def check_name(name: str) -> None:
    """Raise UsageError when `name` is neither a known set nor an existing path, nor several of these joined
    by commas. Touches no network."""
    if name in known_names() or Path(name).exists():
        return
    if "," in name:
        for part in name.split(","):
            check_name(part)
        return
    raise UsageError(
        f"--calib-dataset {name}: no such file, and not one of {', '.join(known_names())}; "
        "give one of these names or a .txt, .jsonl or .parquet file or folder"
    )


def load_texts(
    name: str, split: str = "calibration", tokenizer: Any = None, limit: int | None = None
) -> list[str]:
    """The documents of a text set, at most about `limit` characters of them.

    `name` is `builtin`, a local file or folder, or a hub set; `split` "calibration" or "evaluation" never
    overlap (a local path has one split: it is the whole of both). OWN are no text sets: use `load_windows`.
    """
    if split not in SPLITS:
        raise UsageError(f"split {split}: expected one of {', '.join(SPLITS)}")
    check_name(name)
    found: list[str] = []
    size = 0
    for text in _documents(name, split, tokenizer):
        found.append(text)
        size += len(text)
        if limit is not None and size >= limit:
            break
    if not any(text.strip() for text in found):
        raise TurbomillError(f"{name}: no text in it, expected at least one window of it")
    return found


def _documents(name: str, split: str, tokenizer: Any) -> Iterator[str]:
    if name == "builtin":
        yield from builtin.topics(split)
    elif name in hub.HUB_SETS:
        yield from hub.stream(name, split, tokenizer)
    elif name in OWN:
        raise UsageError(f"{name}: sampled from the model as token windows, it has no text to load")
    else:
        yield from read_path(Path(name), tokenizer)


def token_ids(tokenizer: Any, texts: list[str]) -> Tensor:
    """The ids of the texts joined by blank lines, without special tokens: int64 [len]."""
    # `verbose` off: a long text is what we want, the tokenizer's warning about model_max_length is noise.
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _openings(tokenizer: Any, pieces: int, split: str) -> Tensor:
    """The first OPENING tokens of pieces at equal steps in the built-in text: at least `pieces`, if it has as
    many."""
    text = token_ids(tokenizer, load_texts("builtin", split))
    return text.unfold(0, OPENING, max((text.numel() - OPENING) // pieces, 1))


def load_windows(
    name: str,
    tokenizer: Any,
    samples: int,
    seqlen: int,
    split: str = "calibration",
    seed: int = 0,
    model: Callable[[], Any] | None = None,
) -> Windows:
    """Windows of `seqlen` tokens from the set `name`, at most `samples` of them (fewer, logged, from a short
    text).

    Several sets joined by commas share the samples evenly, the first taking what is left over. `model` builds
    a transformers causal LM, and is called for `self` and `free` alone, which `seed` makes repeatable.
    """
    if samples < 1 or seqlen < 1:
        raise UsageError(f"--calib-samples {samples} --calib-seqlen {seqlen}: both must be at least 1")
    if "," in name and not Path(name).exists():
        names = name.split(",")
        if samples < len(names):
            raise UsageError(f"--calib-samples {samples}: expected at least one for each of {name}")
        shares = [samples // len(names) + (samples % len(names) if i == 0 else 0) for i in range(len(names))]
        parts = [
            load_windows(part, tokenizer, share, seqlen, split, seed, model).ids
            for part, share in zip(names, shares, strict=True)
        ]
        for part, cut in zip(names, parts, strict=True):
            if cut.shape[1] != seqlen:
                raise TurbomillError(
                    f"{part}: {cut.shape[1]} tokens of text, less than one window of {seqlen}; "
                    "give more text, or a smaller --calib-seqlen, to mix it with others"
                )
        cut = torch.cat(parts)
        return Windows(cut, name, split, fingerprint(cut))
    if name in OWN:
        if model is None:
            raise UsageError(f"{name}: needs the model it samples from")
        if name == "free":
            cut = sample_ids(model(), samples, seqlen, seed + (split == "evaluation"))
        else:
            openings = _openings(tokenizer, samples * -(-seqlen // PIECE), split)
            cut = sample_ids(model(), samples, seqlen, seed, OWN_BATCH, openings)
    else:
        limit = samples * seqlen * HUB_CHARACTERS_PER_TOKEN if name in hub.HUB_SETS else None
        texts = load_texts(name, split, tokenizer, limit)
        cut = windows(token_ids(tokenizer, texts), samples, seqlen, source=name)
    return Windows(cut, name, split, fingerprint(cut))
