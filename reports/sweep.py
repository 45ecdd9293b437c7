"""`turbomill sweep`: quantize, convert, score and measure a grid of recipes; what is unchanged is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.convert.checkpoint import open_checkpoint, open_dense
from turbomill.convert.store import Store, convert_checkpoint, open_store
from turbomill.errors import TurbomillError, UsageError
from turbomill.quant import quantize
from turbomill.quant.checks import check_run, with_group
from turbomill.reports.bench_engine import bench_engine
from turbomill.reports.bench_serve import bench_serve
from turbomill.reports.kv import evaluate_kv
from turbomill.reports.perplexity import evaluate_ppl
from turbomill.reports.quant_log import is_quantization, load_quantization
from turbomill.reports.render import write_report
from turbomill.reports.runs import (
    RUN_FILE,
    Run,
    Variant,
    check_run_dir,
    load_run,
    model_card,
    new_run,
    save_run,
)
from turbomill.reports.steps import Step, text_version
from turbomill.reports.sweep_file import DENSE, Recipe, Sweep
from turbomill.reports.sweep_table import SweepTable
from turbomill.reports.tables import kl_text, number
from turbomill.reports.tasks import evaluate_tasks

logger = logging.getLogger("turbomill.reports")


class Sweeper:
    """One sweep in a directory: checkpoints/, stores/ and runs/, each named by the variant."""

    def __init__(self, sweep: Sweep, work_dir: Path) -> None:
        self.sweep, self.work_dir = sweep, work_dir.absolute()
        self.failures: dict[str, str] = {}
        measured = {"tasks": sweep.tasks, "kv": sweep.kv, "bench": sweep.loads, "serve": sweep.serve}
        names = [DENSE, *(recipe.name for recipe in sweep.recipes)]
        steps = ["quantize", "convert", "score", *(name for name, asked in measured.items() if asked)]
        self.table = SweepTable(names, steps)

    def check(self) -> None:
        """Every recipe against the model, before the first is begun. Raises UsageError with all that fail."""
        check_run_dir(self.work_dir)
        checkpoint = open_dense(self.sweep.model)
        wrong = []
        for recipe in self.sweep.recipes:
            folder = self.work_dir / "checkpoints" / recipe.name
            try:
                if not recipe.options.pad:  # a padded model is another one; its own run checks it
                    check_run(checkpoint, folder, recipe.method, with_group(checkpoint, recipe.options))
            except TurbomillError as error:
                wrong.append(f"{recipe.name}: {error}")
        if wrong:
            count = f"{len(wrong)} of {len(self.sweep.recipes)}"
            raise UsageError(f"{count} recipes cannot run: {'; '.join(wrong)}")

    def run(self) -> Run:
        """Everything that is not there yet. A variant that fails is left out, and told in the end."""
        self.check()
        with self.table.shown():
            dense = self._stored(DENSE, open_checkpoint(self.sweep.model).path)
            self._measured(DENSE, dense, dense)
            for recipe in self.sweep.recipes:
                try:
                    store = self._stored(recipe.name, self._quantized(recipe))
                    self._measured(recipe.name, store, dense)
                except TurbomillError as error:
                    logger.error("%s: %s", recipe.name, error)
                    self.failures[recipe.name] = str(error)
        return self._concluded(dense)

    def _step(self, variant: str, name: str, output: Path, inputs: dict[str, Any], make: Any) -> Path:
        step = Step(f"{name} {variant}", output, inputs)
        if step.done:
            self.table.set(variant, name, "unchanged")
            logger.info("%s %s: unchanged", name, variant)
        else:
            with self.table.step(variant, name):
                step.run(make)
        return output

    def _quantized(self, recipe: Recipe) -> Path:
        source = open_checkpoint(self.sweep.model)
        inputs = {
            "source": source.fingerprint,
            "method": recipe.method,
            "options": recipe.options.describe(),
            "text": text_version(recipe.options.calib_dataset),
        }
        output = self.work_dir / "checkpoints" / recipe.name
        return self._step(
            *(recipe.name, "quantize", output, inputs),
            lambda path: quantize(self.sweep.model, path, recipe.method, recipe.options),
        )

    def _stored(self, name: str, checkpoint: Path) -> Store:
        dense = name == DENSE
        inputs = {"checkpoint": open_checkpoint(checkpoint).fingerprint}
        output = self.work_dir / "stores" / name
        return open_store(
            self._step(
                *(name, "convert", output, inputs),
                lambda path: convert_checkpoint(checkpoint, path, force=True, dense=dense),
            )
        )

    def _measured(self, name: str, store: Store, dense: Store) -> None:
        sweep, path = self.sweep, str(store.path)
        models = {"store": store.fingerprint, "reference": dense.fingerprint}
        score = replace(sweep.score, cache=self.work_dir / "reference")
        text = text_version(score.dataset)
        scoring = {**models, "text": text, "options": {**asdict(score), "cache": None}}
        machine = {"cpu": console.cpu_name(), "threads": sweep.num_threads}

        def measure(step: str, inputs: dict[str, Any], make: Callable[[Path], object]) -> None:
            folder = self.work_dir / "runs" / name / step
            # Measurements write their folder's run.json themselves.
            self._step(name, step, folder / RUN_FILE, inputs, lambda file: make(file.parent))

        measure(
            "score", scoring, lambda at: evaluate_ppl(path, score, reference=str(dense.path), work_dir=at)
        )
        self._tell(name)
        if sweep.tasks is not None:
            asked = replace(sweep.tasks, cache=self.work_dir / "reference")
            inputs = {"store": store.fingerprint, "options": asked.describe()}
            measure("tasks", inputs, lambda at: evaluate_tasks(path, asked, work_dir=at))
        if (kv := sweep.kv) is not None:
            measure(
                "kv",
                {**scoring, "kv": asdict(kv), "machine": machine},
                lambda at: evaluate_kv(path, score, kv, reference=str(dense.path), work_dir=at),
            )
        if sweep.loads:
            loads = [asdict(load) for load in sweep.loads]
            inputs = {"store": store.fingerprint, "loads": loads, "rounds": sweep.rounds, "machine": machine}
            measure(
                "bench",
                inputs,
                lambda at: bench_engine(
                    path, sweep.loads, rounds=sweep.rounds, num_threads=sweep.num_threads, work_dir=at
                ),
            )
        if (load := sweep.serve) is not None:
            slo = sweep.slo and asdict(sweep.slo)
            inputs = {"store": store.fingerprint, "load": asdict(load), "slo": slo, "machine": machine}
            measure(
                "serve",
                inputs,
                lambda at: bench_serve(
                    load, model=path, num_threads=sweep.num_threads, slo=sweep.slo, work_dir=at
                ),
            )
        self._tell(name)

    def _run_of(self, name: str, step: str) -> Run | None:
        folder = self.work_dir / "runs" / name / step
        return load_run(folder) if (folder / RUN_FILE).is_file() and step in self.table.steps else None

    def _decode(self, name: str) -> float | None:
        """Tokens/s of the smallest batch."""
        bench = self._run_of(name, "bench")
        return min(bench.engine, key=lambda speed: speed.batch).decode_tok_s if bench else None

    def _tell(self, name: str) -> None:
        run = self._run_of(name, "score")
        if run is not None and run.score is not None and run.model is not None:
            size, speed = number(run.model.disk_bytes / 1e6, 1), number(self._decode(name), 1)
            self.table.tell(name, (number(run.score.ppl, 3), kl_text(run.score.kl), size, speed))

    def _concluded(self, dense: Store) -> Run:
        """The sweep's own run.json, and the report of everything."""
        variants, details = [], []
        for name in self.table.variants:
            scored = self._run_of(name, "score")
            if name in self.failures or scored is None or scored.score is None or scored.model is None:
                continue
            score = scored.score
            kv = self._run_of(name, "kv")
            variants.append(
                Variant(
                    name=name,
                    model=scored.model.model_copy(update={"name": name}),
                    ppl=score.ppl,
                    kl=score.kl,
                    top1=score.top1,
                    disk_bytes=scored.model.disk_bytes,
                    peak_bytes=None,
                    decode_tok_s=self._decode(name),
                    kv={policy.name: policy for policy in kv.policies} if kv else {},
                )
            )
            more = [self._run_of(name, step) for step in ("tasks", "bench", "serve")]
            details += [self._named(run, name) for run in more if run is not None]
            checkpoint = self.work_dir / "checkpoints" / name
            if is_quantization(checkpoint):
                details.append(load_quantization(checkpoint))
        failed = "; ".join(f"{name}: {error}" for name, error in self.failures.items())
        run = new_run(
            "sweep",
            {"recipes": {recipe.name: recipe.options.describe() for recipe in self.sweep.recipes}},
            model=model_card(self.sweep.model, dense),
            reference=model_card(DENSE, dense),
            variants=variants,
            status="failed" if failed else "complete",
            error=failed or None,
        )
        save_run(run, self.work_dir)
        write_report([run, *details], self.work_dir / "report.html")
        return run

    def _named(self, run: Run, name: str) -> Run:
        """The variant's name in place of its store's path."""
        card = run.model and run.model.model_copy(update={"name": name})
        return run.model_copy(update={"model": card})
