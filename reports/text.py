"""The text that a model is scored on, and how it is cut into windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbomill.calib_data import OWN, Windows, load_texts, token_ids
from turbomill.calib_data.windows import fingerprint, windows
from turbomill.convert.store import Store
from turbomill.errors import TurbomillError, UsageError


@dataclass(frozen=True)
class TextOptions:
    """Which text, and how it is cut.

    `windows` at equal steps over the whole text; or, when that is None or with a `stride`, from the text's
    beginning on. None with windows of 2048 tokens is how GPTQ (arXiv 2210.17323), AWQ and those after them
    evaluate WikiText-2; with a stride below `window_len` every window but the first scores its last `stride`
    tokens only, the others being their context.
    """

    dataset: str = "builtin"
    windows: int | None = 24  # None: all that the text has
    window_len: int = 1024
    stride: int | None = None
    force: bool = False  # also the text that the model was calibrated on

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("windows", self.windows, 1, math.inf),
            ("window-len", self.window_len, 2, math.inf),
            ("stride", self.stride, 1, self.window_len),
        ):
            if value is not None and not low <= value <= high:
                most = "" if high == math.inf else f" and at most --window-len, {high}"
                raise UsageError(f"--{name} {value}: expected at least {low}{most}")

    @property
    def contiguous(self) -> bool:
        """Whether windows follow one another from the text's beginning."""
        return self.windows is None or self.stride is not None


@dataclass(frozen=True)
class EvalWindows(Windows):
    """Windows to be scored."""

    stride: int | None = None  # of windows that follow one another

    def first(self, index: int) -> int:
        """The first position of window `index` that no window before has scored."""
        return self.length - self.stride if index and self.stride is not None else 0

    def describe(self) -> dict[str, object]:
        """What provenance records."""
        return {**super().describe(), "stride": self.stride}


def load_eval_windows(
    store: Store, options: TextOptions, calibration: Mapping[str, Any] | None = None
) -> EvalWindows:
    """The evaluation text's windows with the store's tokenizer. Raises when not one whole window is there.

    `calibration` is what the model's maker recorded of its calibration text: the same text is refused.
    """
    length, dataset = options.window_len, options.dataset
    if length > store.context_length:
        raise UsageError(f"--window-len {length}: the model's context is {store.context_length} tokens")
    if dataset in OWN:
        raise UsageError(f"--dataset {dataset}: a model's own text cannot score it; use builtin or a file")
    limit = None
    if dataset != "builtin" and options.windows is not None:
        limit = 16 * options.windows * length
    tokenizer = store.tokenizer()
    ids = token_ids(tokenizer, load_texts(dataset, "evaluation", tokenizer, limit))
    if calibration and not options.force and _is_calibration(dataset, ids, calibration):
        raise UsageError(
            f"--dataset {dataset}: the model was calibrated on this text, which flatters it; "
            "give another text, or --force"
        )
    if options.contiguous:
        ids = torch.cat([_beginning(tokenizer), ids])
    if ids.numel() < length:
        raise TurbomillError(
            f"--dataset {dataset}: {ids.numel()} tokens of text are too short for one window of "
            f"{length}; give more text or a smaller --window-len"
        )
    if not options.contiguous:
        assert options.windows is not None
        cut = windows(ids, options.windows, length, source=dataset)
        return EvalWindows(cut, dataset, "evaluation", fingerprint(cut))
    stride = options.stride or length
    cut = ids.unfold(0, length, stride)[: options.windows].contiguous()
    return EvalWindows(cut, dataset, "evaluation", fingerprint(cut), stride)


def _beginning(tokenizer: Any) -> Tensor:
    """The special tokens that the tokenizer puts before a text: the papers' first window begins with them."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return torch.tensor(whole[:at], dtype=torch.int64)


def _is_calibration(dataset: str, ids: Tensor, made: Mapping[str, Any]) -> bool:
    """Whether the model was calibrated on this text: the same file, or one with the same windows in it.

    The splits of the built-in text and of the hub's sets never overlap; a local path has only one.
    """
    path = Path(dataset)
    for name in str(made.get("source", "")).split(","):
        if name and path.exists() and Path(name).exists():
            ours, theirs = path.resolve(), Path(name).resolve()
            if ours == theirs or ours in theirs.parents or theirs in ours.parents:
                return True
    count, length = int(made.get("windows", 0)), int(made.get("length", 0))
    if not 0 < count * length <= ids.numel():
        return False
    return fingerprint(windows(ids, count, length)) == made.get("sha256")
