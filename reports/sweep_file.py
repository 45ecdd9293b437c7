"""RECIPES.yaml of `turbomill sweep`: read, checked to the last key, and spread into a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turbomill.errors import TurbomillError, UsageError
from turbomill.quant import Method, QuantOptions
from turbomill.reports.bench_engine import Load
from turbomill.reports.evaluation import EvalOptions
from turbomill.reports.harness.find import OFFLINE
from turbomill.reports.kv import KvOptions
from turbomill.reports.kv_policies import parse_policies
from turbomill.reports.load_client import LoadOptions
from turbomill.reports.slo import Slo
from turbomill.reports.tasks import TaskOptions

DENSE = "dense"  # the variant that is not quantized, and the others' reference
# Keys that QuantOptions calls otherwise.
RENAMED = {"w_bits": "bits", "w_group_size": "group"}


class Keys(BaseModel):
    """A mapping of the file. Unknown keys are an error: nobody would follow them."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeKeys(Keys):
    """One or more quantizations: where a value is a list, each of its values."""

    name: str | None = Field(None, pattern=r"^[\w.+-]+$")
    method: Method | list[Method]
    w_bits: int | list[int] = 4
    w_group_size: int | list[int] = 128
    symmetric: bool | list[bool] = False
    format: str | list[str] = ""
    calib_dataset: str | list[str] = "builtin"
    calib_samples: int | list[int] = 128
    calib_seqlen: int | list[int] = 2048
    seed: int | list[int] = 0
    search_scale: bool | list[bool] = True
    correct: bool | list[bool] = True
    damping: float | list[float] = 0.01
    budget: float | list[float] = 0.0
    pad: bool | list[bool] = False
    device: str = "auto"


class ScoreKeys(Keys):
    """As `eval ppl`."""

    dataset: str = "builtin"
    windows: int | Literal["all"] = 24
    window_len: int = 1024
    stride: int | None = None


class TaskKeys(Keys):
    """As `eval tasks`."""

    tasks: list[str] = [OFFLINE]
    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    batch_size: int = 16


class KvKeys(Keys):
    """As `eval kv`."""

    policies: str = "0,8,4r"
    items: int = 3


class BenchKeys(Keys):
    """As `bench engine`."""

    concurrency: list[int] = [1]
    prompt_tokens: list[int] = [128]
    completion_tokens: list[int] = [64]
    test_round: int = Field(default=3, ge=1)


class ServeKeys(Keys):
    """As `bench serve`."""

    num_prompts: int = 32
    random_input_len: int = 128
    random_output_len: int = 64
    request_rate: float = math.inf
    max_concurrency: int | None = None
    goodput: list[str] = []
    seed: int = 0


class SweepKeys(Keys):
    """The file."""

    model: str
    recipes: list[RecipeKeys] = Field(min_length=1)
    num_threads: int = Field(0, ge=0)
    score: ScoreKeys = ScoreKeys()
    tasks: TaskKeys | None = None
    kv: KvKeys | None = None
    bench: BenchKeys | None = BenchKeys()
    serve: ServeKeys | None = None


@dataclass(frozen=True)
class Recipe:
    """One quantization of the grid."""

    name: str
    method: Method
    options: QuantOptions


@dataclass(frozen=True)
class Sweep:
    """What a sweep does: every recipe, and the same measurements of each."""

    model: str
    recipes: tuple[Recipe, ...]
    num_threads: int
    score: EvalOptions
    tasks: TaskOptions | None
    kv: KvOptions | None
    loads: tuple[Load, ...]  # of the engine; none: it is not measured
    rounds: int
    serve: LoadOptions | None
    slo: Slo | None


class _UniqueKeys(yaml.SafeLoader):
    """A key that comes twice is an error: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As a dict."""
        seen: set[object] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if isinstance(name, str) and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def load_sweep(path: Path) -> Sweep:
    """Read and check RECIPES.yaml. Raises UsageError, in one line, naming the key."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); expected a YAML file with recipes") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UsageError(f"{path}: {where}{getattr(error, 'problem', None) or error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected a mapping with the keys model and recipes")
    try:
        keys = SweepKeys.model_validate(found)
    except ValidationError as error:
        raise UsageError(f"{path}: {_told(error)}") from None
    recipes = tuple(_recipes(path, keys.recipes))
    threads = keys.num_threads
    score, serve = keys.score, keys.serve
    windows = None if score.windows == "all" else score.windows
    with _Naming(path, "score"):
        scored = EvalOptions(score.dataset, windows, score.window_len, score.stride, num_threads=threads)
    with _Naming(path, "tasks"):
        given = {} if keys.tasks is None else {**keys.tasks.model_dump(), "tasks": tuple(keys.tasks.tasks)}
        tasks = None if keys.tasks is None else TaskOptions(**given, num_threads=threads)
    with _Naming(path, "kv"):
        kv = None if keys.kv is None else KvOptions(parse_policies(keys.kv.policies), keys.kv.items)
    with _Naming(path, "bench"):
        loads = _loads(keys.bench)
    with _Naming(path, "serve"):
        slo = None if serve is None else Slo.parse(serve.goodput)
        load = None if serve is None else _serve(serve)
    rounds = keys.bench.test_round if keys.bench else 1
    return Sweep(keys.model, recipes, threads, scored, tasks, kv, loads, rounds, load, slo)


class _Naming:
    """Errors of the options' own checks say which part of the file they are about."""

    def __init__(self, path: Path, key: str) -> None:
        self._where = f"{path}: {key}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TurbomillError):
            raise UsageError(f"{self._where}: {error}") from None


def _told(error: ValidationError) -> str:
    """The first problem; of several kinds that a value could have, the message of the first."""
    first = error.errors()[0]
    # A union's branches are part of the place: ("recipes", 0, "w_bits", "int").
    where = [part for part in first["loc"] if isinstance(part, int) or str(part) in _known()]
    key = ".".join(map(str, where if first["type"] != "extra_forbidden" else first["loc"]))
    message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
    return f"{key}: {message}"


def _known() -> set[str]:
    models = (SweepKeys, RecipeKeys, ScoreKeys, TaskKeys, KvKeys, BenchKeys, ServeKeys)
    return {name for model in models for name in model.model_fields}


def _loads(bench: BenchKeys | None) -> tuple[Load, ...]:
    if bench is None:
        return ()
    grid = itertools.product(bench.prompt_tokens, bench.completion_tokens, bench.concurrency)
    return tuple(Load(batch, prompt, completion) for prompt, completion, batch in grid)


def _serve(serve: ServeKeys) -> LoadOptions:
    return LoadOptions(
        num_prompts=serve.num_prompts,
        input_len=serve.random_input_len,
        output_len=serve.random_output_len,
        request_rate=serve.request_rate,
        max_concurrency=serve.max_concurrency,
        seed=serve.seed,
    )


def _recipes(path: Path, entries: Sequence[RecipeKeys]) -> list[Recipe]:
    """The grid, in the file's order; the last list changes fastest."""
    found: list[Recipe] = []
    for number, entry in enumerate(entries):
        given = entry.model_dump(exclude={"name"})
        lists = {key: value for key, value in given.items() if isinstance(value, list)}
        for key, value in lists.items():
            if not value:
                raise UsageError(f"{path}: recipes.{number}.{key}: an empty list, expected values")
        for values in itertools.product(*lists.values()):
            chosen = {**given, **dict(zip(lists, values, strict=True))}
            method = chosen.pop("method")
            varied = [key for key in lists if key not in ("method", *RENAMED)]
            with _Naming(path, f"recipes.{number}"):
                options = QuantOptions(**{RENAMED.get(k, k): v for k, v in chosen.items()}, overwrite=True)
            name = _name(entry.name, method, chosen, varied, len(lists))
            if name == DENSE or any(name == other.name for other in found):
                raise UsageError(f"{path}: recipes.{number}.name: {name} is there twice; give each its own")
            found.append(Recipe(name, method, options))
    return found


def _name(own: str | None, method: str, chosen: dict[str, Any], varied: Sequence[str], lists: int) -> str:
    """The recipe's own name where it stands for one quantization; else what tells the grid's apart."""
    if own is not None and not lists:
        return own
    scheme = f"w{chosen['w_bits']}g{chosen['w_group_size']}"
    size = f"{chosen['budget']:g}bits" if chosen["budget"] else scheme
    parts = [f"{key}-{str(chosen[key]).replace('/', '-').lower()}" for key in varied if key != "budget"]
    return "-".join([*([own] if own else []), method, size, *parts])
