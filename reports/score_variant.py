"""Scores one store in a process of its own, so that its peak memory is its own.

`python -m turbomill.reports.score_variant SPEC.json OUT.json`
"""

from __future__ import annotations

import json
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from turbomill.console import setup_logging
from turbomill.convert.store import open_store
from turbomill.engine.config import EngineConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError
from turbomill.reports.bench_engine import measure
from turbomill.reports.evaluation import EvalOptions, References, check_comparable, score
from turbomill.reports.kv import decode_load, kv_policy
from turbomill.reports.kv_policies import POLICIES
from turbomill.reports.runs import KvPolicy, Variant, model_card, write_atomic
from turbomill.reports.text import load_eval_windows


@dataclass(frozen=True)
class VariantSpec:
    """What to score."""

    name: str
    store: str
    reference: str  # the unquantized store
    policies: tuple[str, ...]  # the first gives the variant's own figures
    dataset: str
    windows: int
    window_len: int
    rounds: int
    num_threads: int
    cache: str

    @property
    def options(self) -> EvalOptions:
        """For the evaluation."""
        return EvalOptions(
            dataset=self.dataset,
            windows=self.windows,
            window_len=self.window_len,
            num_threads=self.num_threads,
            cache=Path(self.cache),
        )


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes (Linux counts in KiB).

    Not ru_maxrss where /proc tells: a child inherits that from the process that started it.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_decode(spec: VariantSpec, kv: KvScheme) -> float:
    """Decode tokens/s of one sequence, on an engine that does nothing else."""
    store = open_store(Path(spec.store))
    load = decode_load(store, spec.window_len)
    config = EngineConfig(
        session_len=load.prompt_tokens + load.completion_tokens,
        max_batch_size=1,
        **kv.settings,
        num_threads=spec.num_threads,
    )
    with TurbomindEngine(store, config, reason="its speed is measured") as engine:
        return measure(engine, load, store.model["vocab_size"], rounds=spec.rounds).decode_tok_s


def score_variant(spec: VariantSpec) -> Variant:
    """Speed and memory first, while nothing but the engine has taken memory; then the scores."""
    store, reference_store = open_store(Path(spec.store)), open_store(Path(spec.reference))
    check_comparable(store, reference_store)
    speeds: list[float] = []
    peak = 0
    for policy in spec.policies:
        speeds.append(measure_decode(spec, POLICIES[policy].scheme))
        peak = peak or peak_memory()
    options = spec.options
    cut = load_eval_windows(reference_store, options)
    references = References(reference_store, cut, options)
    references.prepare()
    rows: list[KvPolicy] = []
    for policy, speed in zip(spec.policies, speeds, strict=True):
        kv = POLICIES[policy].scheme
        with TurbomindEngine(store, options.engine_config(kv), reason="it is scored") as engine:
            result = score(engine, cut, references, f"{spec.name} KV {policy}").score()
        rows.append(kv_policy(store, policy, kv, result, speed))
    first = rows[0]
    return Variant(
        name=spec.name,
        model=model_card(spec.name, store),
        ppl=first.ppl,
        kl=first.kl,
        top1=first.top1,
        disk_bytes=store.disk_bytes,
        peak_bytes=peak,
        decode_tok_s=first.decode_tok_s,
        kv={row.name: row for row in rows},
    )


def main(spec_file: str, out_file: str) -> None:
    """Read the spec, score, write the variant. Errors are one line on stderr and exit code 1."""
    setup_logging()
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    try:
        variant = score_variant(VariantSpec(**{**spec, "policies": tuple(spec["policies"])}))
    except TurbomillError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    write_atomic(Path(out_file), variant.model_dump_json(indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
