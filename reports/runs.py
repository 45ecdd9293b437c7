"""A run: a directory with `run.json`, which says what was measured and what made it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turbomill import console
from turbomill.errors import TurbomillError, UsageError

if TYPE_CHECKING:
    from turbomill.convert.store import Store
    from turbomill.engine.pytorch.load import Source

SCHEMA_VERSION = 2
READABLE = (1, 2)  # 2 added fields, all of which may be missing
RUN_FILE = "run.json"
Verdict = Literal["safe", "test first", "do not use"]
Kind = Literal["ppl", "kv", "tasks", "bench_engine", "bench_serve", "demo", "quantize", "sweep"]


class Record(BaseModel):
    """A part of a run. Unknown fields are an error: they would be read by nobody."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelCard(Record):
    """Which model: enough to tell whether two runs measured the same one."""

    name: str  # as the user said it
    path: str  # of the store, or of what backend pytorch runs
    fingerprint: str
    architecture: str
    scheme: str | None  # None: dense
    disk_bytes: int
    vocab_size: int


class WindowScores(Record):
    """One number per window, in order."""

    nll: list[float]
    kl: list[float] | None
    top1: list[float] | None
    top5: list[float] | None = None
    tokens: list[int] | None = None  # that `nll` is the mean over


class WorstWindow(Record):
    """A window that came out badly, for people to look at."""

    index: int
    ppl: float
    kl: float | None
    top1: float | None
    text: str  # how it begins


class Score(Record):
    """How well a model predicts text, and how close it stays to the reference (turbomill.reports.scores)."""

    ppl: float
    kl: float | None  # None: no reference
    top1: float | None
    top5: float | None = None  # share of the reference's five likeliest tokens among the five likeliest
    positions: int  # that KL and top-1 are means over
    ppl_ci: tuple[float, float] | None = None  # 95 %; None: a single window
    kl_ci: tuple[float, float] | None = None
    worst: list[WorstWindow] = []
    per_window: WindowScores | None = Field(None, repr=False)


class Speed(Record):
    """Speed of `batch` sequences that run together. Medians over `rounds`."""

    batch: int
    prompt_tokens: int
    completion_tokens: int
    prefill_tok_s: float
    decode_tok_s: float  # all sequences together
    rounds: int
    # While `batch` sequences decode and the prompts of as many more are read; None: not measured.
    mixed_prefill_tok_s: float | None = None
    mixed_decode_tok_s: float | None = None


class ByLength(Record):
    """Scores of the positions whose context is above the length before and at most `tokens`."""

    tokens: int
    ppl: float
    kl: float | None
    passkey: float | None = None  # accuracy of the tasks of that many tokens
    copied: float | None = None


class LayerKv(Record):
    """How one layer's cache takes rounding (turbomill.reports.kv_stats)."""

    layer: int
    k_absmax: float
    k_outlier: float  # the largest channel of K over the median one of its head
    # "8", "4", "4r" (rotated) -> error of the attention's output, relative to its energy, with K alone
    # rounded, or V alone
    k_error: dict[str, float]
    v_error: dict[str, float]


class KvPolicy(Record):
    """A model under one precision of its KV cache."""

    name: str  # of kv_policies.POLICIES; with layers in 16 bits, "4r+3" for three of them
    quant_policy: int
    rotation: bool = False
    layers_16bit: list[int] = []
    bytes_per_token: float
    bits_per_token: float
    ppl: float
    kl: float | None
    top1: float | None
    decode_tok_s: float | None
    per_window: WindowScores | None = Field(None, repr=False)
    by_length: list[ByLength] = []
    passkey: float | None = None  # over all lengths
    copied: float | None = None
    sequences: int | None = None  # of the run's window_len, in the memory that was named
    verdict: Verdict | None = None
    reasons: list[str] = []  # why it is not "safe"


class TaskScore(Record):
    """One metric of a task of lm-evaluation-harness, or of a group of them."""

    task: str
    metric: str
    filter: str  # what was made of the answers before: "none" for nothing
    value: float
    stderr: float | None  # None: the harness knows none for this metric, or a single document
    higher_is_better: bool | None
    documents: int
    fewshot: int | None
    version: str | None  # of the task
    group: bool = False  # whether it stands for several tasks, which are here too
    # Each document's score, where the value is their mean, and a hash of the documents: to compare in pairs.
    items: list[float] | None = Field(None, repr=False)
    items_sha256: str | None = None


class Variant(Record):
    """One form of the model, scored. `kv` is by bits of the KV cache."""

    name: str
    model: ModelCard
    ppl: float
    kl: float | None
    top1: float | None
    disk_bytes: int
    peak_bytes: int | None  # resident memory of a process that loads the store and generates
    decode_tok_s: float | None
    kv: dict[str, KvPolicy]


class LayerResult(Record):
    """What quantization did to one linear: a row of `turbomill lite`'s quant_log.csv."""

    layer: int
    linear: str
    method: str
    weight_error: float
    rtn_loss: float | None
    loss: float | None
    fallback: bool
    seconds: float
    tokens: int | None
    scheme: str


class Run(Record):
    """Everything one command measured. Which lists are filled depends on `kind`."""

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    kind: Kind
    status: Literal["complete", "failed"] = "complete"
    error: str | None = None  # why a failed run failed
    model: ModelCard | None = None
    reference: ModelCard | None = None
    windows: dict[str, Any] | None = None  # what the text was, and how it was cut
    score: Score | None = None
    tasks: list[TaskScore] = []
    variants: list[Variant] = []
    policies: list[KvPolicy] = []
    kv_layers: list[LayerKv] = []
    verdict: Verdict | None = None  # on quantizing the cache
    recommended: dict[str, Any] | None = None
    engine: list[Speed] = []
    serve: list[dict[str, Any]] = []  # fields of `vllm bench serve`
    knee: dict[str, Any] | None = None  # the highest rate that met the SLO; None: not looked for
    layers: list[LayerResult] = []
    question: str | None = None
    answer: str | None = None
    provenance: dict[str, Any]


def model_card(name: str, store: Store) -> ModelCard:
    """Describe an open store that the user called `name`."""
    scheme = store.manifest["scheme"]
    return ModelCard(
        name=name,
        path=str(store.path),
        fingerprint=store.fingerprint,
        architecture=store.manifest["architecture"],
        scheme=scheme and f"{scheme['format']} {store.scheme}",
        disk_bytes=store.disk_bytes,
        vocab_size=store.model["vocab_size"],
    )


def source_card(name: str, source: Source) -> ModelCard:
    """The same of a model that backend pytorch has opened."""
    return ModelCard(
        name=name,
        path=str(source.path),
        fingerprint=source.checkpoint.fingerprint,
        architecture=source.architecture,
        scheme=source.scheme,
        disk_bytes=source.checkpoint.disk_bytes,
        vocab_size=source.vocab_size,
    )


def new_run(kind: Kind, settings: dict[str, Any], **fields: Any) -> Run:
    """A run with its provenance; `settings` are the options that shaped it."""
    made = console.provenance(settings=settings)
    # As it will be read back: tuples and paths have no JSON of their own.
    return Run(kind=kind, provenance=json.loads(json.dumps(made, default=str)), **fields)


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is never seen half-written. Raises UsageError when the place cannot be written."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def save_run(run: Run, directory: Path) -> Path:
    """Write `run` as DIRECTORY/run.json, replacing an older one."""
    path = Path(directory) / RUN_FILE
    write_atomic(path, json.dumps(run.model_dump(), indent=2, ensure_ascii=False) + "\n")
    return path


def check_run_dir(directory: Path) -> None:
    """Raise UsageError, before any work, when a run cannot be written there."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--work-dir {directory}: is a file, expected a directory for the run")
    nearest = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not os.access(nearest, os.W_OK):
        raise UsageError(f"--work-dir {directory}: cannot be written, choose another")


def load_run(path: Path) -> Run:
    """Read a run from its directory or its run.json. Raises TurbomillError naming the field that is wrong."""
    path = Path(path)
    file = path if path.suffix == ".json" else path / RUN_FILE
    if not file.is_file():
        raise TurbomillError(f"{file}: no such file; a run is a directory with {RUN_FILE} (see --work-dir)")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TurbomillError(f"{file}: not JSON ({error}); make the run again") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version not in READABLE:
        raise TurbomillError(
            f"{file}: schema_version is {version}, this turbomill reads {' and '.join(map(str, READABLE))}; "
            "make the run again"
        )
    try:
        return Run.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TurbomillError(f"{file}: {where}: {first['msg']}; make the run again") from None
