"""What every evaluation needs: two models that can be compared, the reference, a pass of the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turbomill import __version__, console
from turbomill.calib_data import Windows
from turbomill.convert.source import kind_of, resolve_model
from turbomill.convert.store import Store
from turbomill.convert.writer import MARKER
from turbomill.engine.config import EngineConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.stores import cache_dir
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import UsageError
from turbomill.reports.journal import Journal
from turbomill.reports.reference import Reference, ReferenceCache, make_reference, reference_key
from turbomill.reports.runs import Score, WorstWindow
from turbomill.reports.scores import Tally, check_logits, score_window, worst
from turbomill.reports.text import EvalWindows, TextOptions

logger = logging.getLogger("turbomill.reports")

SHOWN_TOKENS, SHOWN_CHARACTERS = 48, 120  # of a bad window


class Scorer(Protocol):
    """The part of an engine that scoring uses."""

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """fp32 logits [T, V]."""
        ...


@dataclass(frozen=True)
class EvalOptions(TextOptions):
    """Which text, how it is cut, and how the engine runs."""

    num_threads: int = 0
    cache_dtype: str = "auto"
    cache: Path = field(default_factory=lambda: cache_dir() / "reference")

    def engine_config(self, kv: KvScheme) -> EngineConfig:
        """One window at a time."""
        return EngineConfig(
            session_len=self.window_len,
            max_batch_size=1,
            **kv.settings,
            cache_dtype=self.cache_dtype,
            num_threads=self.num_threads,
            enable_prefix_caching=False,  # windows that overlap are still computed from their beginning
        )


def read_marker(model: str, store: Store) -> dict[str, Any] | None:
    """What `turbomill lite` recorded of the checkpoint that MODEL is or was converted from, if it made it."""
    path = resolve_model(model)
    if kind_of(path) == "store":
        path = Path(store.manifest.get("source", {}).get("path", ""))
    marker = path / MARKER
    return json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else None


def find_reference(model: str, store: Store) -> str | None:
    """The full-precision model that MODEL was quantized from, by what its makers recorded; None when unknown.

    A store names its checkpoint; one of `turbomill lite` names its source, with that one's fingerprint.
    """
    if store.scheme is None:
        return None
    made = read_marker(model, store)
    if made is None:
        return None
    source = made.get("source")
    if not source or not Path(source).exists():
        return None
    from turbomill.convert.checkpoint import open_checkpoint

    if open_checkpoint(source).fingerprint != made.get("source_fingerprint"):
        logger.warning("%s has changed since %s was quantized from it: not used as reference", source, model)
        return None
    return source


def _shape(store: Store) -> str:
    """What quantizing, padding and fusing leave as it is."""
    model = store.model
    size = f"{model['num_layers']} layers of {model['hidden_size']}"
    return f"{store.manifest['architecture']}, {size}, {model['num_heads']} heads of {model['head_dim']}"


def check_comparable(candidate: Store, reference: Store, force: bool = False) -> None:
    """Raise UsageError unless both are forms of one model; with `force`, models with the same tokens."""
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
    if not force and _shape(candidate) != _shape(reference):
        raise UsageError(
            f"--reference {reference.path}: is another model ({_shape(reference)}) than {candidate.path} "
            f"({_shape(candidate)}); give the model this one was made from, or --force"
        )


class References:
    """The reference's logits for one set of windows; each window is computed when it is first asked for."""

    def __init__(self, store: Store, cut: Windows, options: EvalOptions) -> None:
        engine = {"quant_policy": 0, "cache_dtype": options.cache_dtype}
        key = reference_key(store.fingerprint, cut.fingerprint, engine, __version__)
        self.store, self.cut = store, cut
        self._config = options.engine_config(KvScheme())
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
    journal: Journal | None = None,
    part: str = "score",
) -> Tally:
    """Score an engine window by window. Raises LogitsError naming the window whose logits are not finite.

    Windows that `journal` has are taken from it, the others are added to it.
    """
    tally = Tally()
    with console.progress(f"score {name}", cut.count) as task:
        for index, ids in enumerate(cut.ids):
            done = journal.load(part, index) if journal is not None else None
            if done is not None:
                tally.results.append(done)
                task.advance()
                continue
            logits = asyncio.run(engine.logits(ids.tolist()))
            check_logits(logits, index, name)
            reference = None if references is None else references[index]
            first = cut.first(index) if isinstance(cut, EvalWindows) else 0
            tally.results.append(score_window(ids.numpy(), logits, reference, first))
            if journal is not None:
                journal.save(part, index, tally.results[-1])
            task.advance()
    return tally


def journal_of(
    store: Store,
    reference: Store | None,
    cut: EvalWindows,
    options: EvalOptions,
    schemes: Sequence[KvScheme],
) -> Journal:
    """Of scoring `store` under these KV schemes, each of which is a part of it."""
    return Journal.of(
        options.cache,
        store=store.fingerprint,
        reference=reference and reference.fingerprint,
        windows=cut.fingerprint,
        stride=cut.stride,
        cache_dtype=options.cache_dtype,
        policies=[kv.settings for kv in schemes],
    )


def with_worst(score: Score, cut: Windows, tokenizer: Any) -> Score:
    """The score with its worst windows, as text."""
    per_window = score.per_window
    assert per_window is not None
    shown = [
        WorstWindow(
            index=i,
            ppl=math.exp(per_window.nll[i]),
            kl=None if per_window.kl is None else per_window.kl[i],
            top1=None if per_window.top1 is None else per_window.top1[i],
            text=" ".join(tokenizer.decode(cut.ids[i, :SHOWN_TOKENS].tolist()).split())[:SHOWN_CHARACTERS],
        )
        for i in worst(per_window)
    ]
    return score.model_copy(update={"worst": shown})


def describe_options(options: EvalOptions, **more: Any) -> dict[str, Any]:
    """What provenance records."""
    return {
        "dataset": options.dataset,
        "windows": "all" if options.windows is None else options.windows,
        "window_len": options.window_len,
        "stride": options.stride,
        "cache_dtype": options.cache_dtype,
        "num_threads": options.num_threads,
        **more,
    }
