"""`turbomill eval tasks`: any task of lm-evaluation-harness, through the engine or a server of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turbomill import __version__
from turbomill.convert.store import Store
from turbomill.engine.config import EngineConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.stores import cache_dir, open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.harness.find import OFFLINE, load_tasks, require_harness
from turbomill.reports.load_client import http_client, served_card
from turbomill.reports.runs import Run, TaskScore, check_run_dir, model_card, new_run, save_run

logger = logging.getLogger("turbomill.reports")

FEWSHOT_SEED = 1234  # the harness's own
BOOTSTRAP = 100_000  # likewise, for metrics that are no mean


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks, and how they are asked."""

    tasks: tuple[str, ...] = (OFFLINE,)
    limit: float | None = None  # documents of each task, or a share of them below 1
    num_fewshot: int | None = None  # None: the task's own
    apply_chat_template: bool = False
    add_bos_token: bool = False
    include_path: Path | None = None
    batch_size: int = 16
    session_len: int | None = None
    kv: KvScheme = field(default_factory=KvScheme)
    num_threads: int = 0
    base_url: str | None = None  # ask a server, not an engine of our own
    served_name: str | None = None
    cache: Path = field(default_factory=lambda: cache_dir() / "reference")

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks):
            raise UsageError("--tasks: expected names of tasks, separated by commas")
        if self.limit is not None and not self.limit > 0:
            raise UsageError(f"--limit {self.limit}: expected a number of documents, or a share below 1")
        for name, value, low in (("num-fewshot", self.num_fewshot, 0), ("batch-size", self.batch_size, 1)):
            if value is not None and value < low:
                raise UsageError(f"--{name} {value}: expected at least {low}")

    def describe(self) -> dict[str, Any]:
        """What provenance records."""
        return {name: value for name, value in asdict(self).items() if name != "cache" and value is not None}


def evaluate_tasks(model: str, options: TaskOptions | None = None, *, work_dir: Path | None = None) -> Run:
    """Score MODEL on tasks; with `base_url` the server there answers, and MODEL gives tokenizer and name.

    Everything that could be missing is looked for before the engine starts. Raises TurbomillError.
    """
    options = options or TaskOptions()
    require_harness()
    if work_dir is not None:
        check_run_dir(work_dir)
    with _quiet():
        loaded = load_tasks(options.tasks, options.include_path)
        _settle(loaded["tasks"], options.num_fewshot)
        store = open_model(model)
        run = new_run("tasks", options.describe(), model=model_card(model, store))
        try:
            run = run.model_copy(update={"tasks": _ask(store, model, loaded, options)})
        except TurbomillError as error:
            if work_dir is not None:
                save_run(run.model_copy(update={"status": "failed", "error": str(error)}), work_dir)
            raise
    if work_dir is not None:
        save_run(run, work_dir)
    return run


def _settle(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Examples before the question: as asked for, but for tasks that say 0, whose prompts have their own."""
    for task in tasks.values():
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)


def _ask(store: Store, name: str, loaded: dict[str, Any], options: TaskOptions) -> list[TaskScore]:
    from aiohttp import ClientError
    from lm_eval.evaluator import evaluate

    from turbomill.reports.harness.model import EngineLM
    from turbomill.reports.harness.resume import ResumableLM

    with _engine(store, options) as engine:
        if engine is not None:
            asked: Any = EngineLM(engine, name, options.batch_size, options.add_bos_token)
        else:
            asked = _server_model(store, options)
        resumable = ResumableLM(asked, options.cache / f"unfinished-{_key(store, options)}")
        try:
            results = evaluate(
                lm=resumable,
                task_dict=loaded,  # type: ignore[arg-type]
                limit=options.limit,  # type: ignore[arg-type]
                bootstrap_iters=BOOTSTRAP,
                apply_chat_template=options.apply_chat_template,
                fewshot_as_multiturn=options.apply_chat_template,
            )
        except ClientError as error:
            raise TurbomillError(f"{options.base_url}: the server failed: {_first_line(error)}") from error
        except (OSError, ValueError, AssertionError, LookupError) as error:
            raise TurbomillError(f"eval tasks: {_first_line(error)}") from error
    assert results is not None
    if cut := getattr(asked, "truncated", 0):
        logger.warning(
            "%d requests were longer than a session of %d tokens and lost their beginning: raise "
            "--session-len, or choose shorter tasks",
            cut,
            asked.max_length + 1,
        )
    resumable.finish()
    return task_scores(results)  # type: ignore[arg-type]


def _engine(store: Store, options: TaskOptions) -> AbstractContextManager[TurbomindEngine | None]:
    if options.base_url is not None:
        return nullcontext()
    config = EngineConfig(
        session_len=options.session_len,
        max_batch_size=options.batch_size,
        **options.kv.settings,
        num_threads=options.num_threads,
    )
    return TurbomindEngine(store, config, reason="it is scored")


def _server_model(store: Store, options: TaskOptions) -> Any:
    """The harness's own client, with this store's tokenizer."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    assert options.base_url is not None
    url = options.base_url.rstrip("/").removesuffix("/v1")
    served = asyncio.run(_served(url))
    tokenizer = store.tokenizer()
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, *store.eos_token_ids)
    prefix = next(token for token in marks if token is not None)
    settings: dict[str, Any] = {
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "model": options.served_name or served["id"],
        "tokenizer": str(store.path),
        "add_bos_token": options.add_bos_token,
        "custom_prefix_token_id": prefix,
        "num_concurrent": options.batch_size,
        "max_length": options.session_len or served.get("max_model_len") or store.context_length,
        "max_retries": 1,
    }
    return LocalCompletionsAPI(**settings)


async def _served(url: str) -> dict[str, Any]:
    async with http_client(url) as client:
        return await served_card(client)


def _key(store: Store, options: TaskOptions) -> str:
    """Names the answers by all that can change them; the questions are in each answer's own key."""
    used = (asdict(options.kv), options.session_len, options.add_bos_token, options.base_url)
    content = json.dumps([__version__, store.fingerprint, *used])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'without a reason'}".split("\n", 1)[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness and its libraries log what is no news; their errors stay."""
    names = ("lm_eval", "datasets", "huggingface_hub", "httpx")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):  # where the harness prints, but results are ours
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def task_scores(results: Mapping[str, Any]) -> list[TaskScore]:
    """The rows of the harness's results, groups before their tasks."""
    groups = results.get("groups", {})
    names = [*groups, *(name for name in results["results"] if name not in groups)]
    return [row for name in names for row in _rows(results, name, name in groups)]


def _rows(results: Mapping[str, Any], name: str, group: bool) -> list[TaskScore]:
    found = results["results"][name]
    rows = []
    for key, value in found.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not _is_number(value):
            continue
        stderr = found.get(f"{metric}_stderr,{kind}")
        items, sha = (None, None) if group else _items(results["samples"][name], metric, kind, float(value))
        rows.append(
            TaskScore(
                task=name,
                metric=metric,
                filter=kind,
                value=float(value),
                stderr=float(stderr) if _is_number(stderr) else None,  # type: ignore[arg-type]
                higher_is_better=results["higher_is_better"].get(name, {}).get(metric),
                documents=len(items) if items else _documents(results, name, found),
                fewshot=results["n-shot"].get(name),
                version=_version(results, name),
                group=group,
                items=items,
                items_sha256=sha,
            )
        )
    return rows


def _version(results: Mapping[str, Any], name: str) -> str | None:
    metadata = results["configs"].get(name, {}).get("metadata") or {}
    found = metadata.get("version", results["versions"].get(name))
    return None if found is None else str(found)


def _documents(results: Mapping[str, Any], name: str, found: Mapping[str, Any]) -> int:
    counted = results["n-samples"].get(name)
    return int(counted["effective"] if counted else found.get("sample_len") or 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(float(value))


def _items(
    samples: Sequence[Mapping[str, Any]], metric: str, kind: str, mean: float
) -> tuple[list[float] | None, str | None]:
    """Each document's score where the metric is their mean, and a hash of the documents."""
    mine = [s for s in samples if s["filter"] == kind and metric in s]
    values = [s[metric] for s in mine]
    if not values or not all(_is_number(v) for v in values):
        return None, None
    numbers = [float(v) for v in values]
    if not math.isclose(sum(numbers) / len(numbers), mean, rel_tol=1e-9, abs_tol=1e-12):
        return None, None
    documents = "".join(f"{s['doc_id']}{s['doc_hash']}{s['prompt_hash']}" for s in mine)
    return numbers, hashlib.sha256(documents.encode()).hexdigest()
