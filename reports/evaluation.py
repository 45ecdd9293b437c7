"""What every evaluation needs: the text's windows, two models that can be compared, a pass of the engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turbomill import __version__, console
from turbomill.calib_data import Windows, load_texts, token_ids
from turbomill.calib_data.windows import fingerprint, windows
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.store import Store
from turbomill.convert.writer import MARKER
from turbomill.engine.config import EngineConfig
from turbomill.engine.stores import cache_dir
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.reference import ReferenceCache, reference_key
from turbomill.reports.runs import Score
from turbomill.reports.scores import Reference, Tally, check_logits, make_reference, score_window

logger = logging.getLogger("turbomill.reports")


class Scorer(Protocol):
    """The part of an engine that scoring uses."""

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """fp32 logits [T, V]."""
        ...


@dataclass(frozen=True)
class EvalOptions:
    """Which text, how it is cut, and how the engine runs."""

    dataset: str = "builtin"
    windows: int = 24
    window_len: int = 1024
    num_threads: int = 0
    cache_dtype: str = "auto"
    cache: Path = field(default_factory=lambda: cache_dir() / "reference")

    def __post_init__(self) -> None:
        for name in ("windows", "window_len"):
            if getattr(self, name) < (low := 1 if name == "windows" else 2):
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {low}")

    def engine_config(self, quant_policy: int) -> EngineConfig:
        """One window at a time."""
        return EngineConfig(
            session_len=self.window_len,
            max_batch_size=1,
            quant_policy=quant_policy,
            cache_dtype=self.cache_dtype,
            num_threads=self.num_threads,
        )


def load_eval_windows(store: Store, options: EvalOptions) -> Windows:
    """The evaluation text's windows with the store's tokenizer. Raises when not one whole window is there."""
    if options.window_len > store.context_length:
        raise UsageError(
            f"--window-len {options.window_len}: the model's context is {store.context_length} tokens"
        )
    if options.dataset == "self":
        raise UsageError("--dataset self: a model's own text cannot score it; use builtin or a file")
    limit = None if options.dataset == "builtin" else 16 * options.windows * options.window_len
    tokenizer = store.tokenizer()
    ids = token_ids(tokenizer, load_texts(options.dataset, "evaluation", tokenizer, limit))
    if ids.numel() < options.window_len:
        raise TurbomillError(
            f"--dataset {options.dataset}: {ids.numel()} tokens of text are too short for one window of "
            f"{options.window_len}; give more text or a smaller --window-len"
        )
    cut = windows(ids, options.windows, options.window_len, source=options.dataset)
    return Windows(cut, options.dataset, "evaluation", fingerprint(cut))


def find_reference(model: str, store: Store) -> str | None:
    """The full-precision model that MODEL was quantized from, by what its makers recorded; None when unknown.

    A store names its checkpoint; one of `turbomill lite` names its source, with that one's fingerprint.
    """
    if store.scheme is None:
        return None
    path = resolve_model(model)
    if kind_of(path) == "store":
        path = Path(store.manifest.get("source", {}).get("path", ""))
    marker = path / MARKER
    if not marker.is_file():
        return None
    made = json.loads(marker.read_text(encoding="utf-8"))
    source = made.get("source")
    if not source or not Path(source).exists():
        return None
    from turbomill.convert.checkpoint import open_checkpoint

    if open_checkpoint(source).fingerprint != made.get("source_fingerprint"):
        logger.warning("%s has changed since %s was quantized from it: not used as reference", source, path)
        return None
    return source


def check_comparable(candidate: Store, reference: Store) -> None:
    """Raise UsageError unless both models speak the same tokens."""
    ours, theirs = candidate.model["vocab_size"], reference.model["vocab_size"]
    what = ""
    if ours != theirs:
        what = f"{theirs} and {ours} tokens"
    elif candidate.tokenizer().get_vocab() != reference.tokenizer().get_vocab():
        what = f"{ours} tokens each, but not the same ones"
    if what:
        raise UsageError(
            f"--reference {reference.path}: its vocabulary and that of {candidate.path} differ ({what}); "
            "KL needs the same vocabulary: give the model this one was made from"
        )


class References:
    """The reference's logits for one set of windows; each window is computed when it is first asked for."""

    def __init__(self, store: Store, cut: Windows, options: EvalOptions) -> None:
        engine = {"quant_policy": 0, "cache_dtype": options.cache_dtype}
        key = reference_key(store.fingerprint, cut.fingerprint, engine, __version__)
        self.store, self.cut = store, cut
        self._config = options.engine_config(0)
        self._cache = ReferenceCache(options.cache / key)

    def prepare(self) -> None:
        """Compute what is missing, on an engine that is closed again."""
        missing = [i for i in range(self.cut.count) if not self._cache.has(i)]
        if not missing:
            return
        self._cache.require_space(len(missing), self.cut.length, self.store.model["vocab_size"])
        with (
            TurbomindEngine(self.store, self._config, reason="the reference") as engine,
            console.progress("reference", len(missing)) as task,
        ):
            for index in missing:
                logits = asyncio.run(engine.logits(self.cut.ids[index].tolist()))
                check_logits(logits, index, str(self.store.path))
                self._cache.save(index, make_reference(logits))
                task.advance()

    def __getitem__(self, index: int) -> Reference:
        return self._cache.load(index)


def score(
    engine: Scorer,
    cut: Windows,
    references: References | None,
    name: str,
) -> Score:
    """Score an engine window by window. Raises LogitsError naming the window whose logits are not finite."""
    tally = Tally()
    with console.progress(f"score {name}", cut.count) as task:
        for index, ids in enumerate(cut.ids):
            logits = asyncio.run(engine.logits(ids.tolist()))
            check_logits(logits, index, name)
            reference = None if references is None else references[index]
            tally.results.append(score_window(ids.numpy(), logits, reference))
            task.advance()
    return tally.score()


def describe_options(options: EvalOptions, **more: Any) -> dict[str, Any]:
    """What provenance records."""
    return {
        "dataset": options.dataset,
        "windows": options.windows,
        "window_len": options.window_len,
        "cache_dtype": options.cache_dtype,
        "num_threads": options.num_threads,
        **more,
    }
