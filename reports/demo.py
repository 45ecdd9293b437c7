"""`turbomill demo`: the whole job on the built-in model, from the checkpoint to an answer and a report."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.store import convert_checkpoint, open_store
from turbomill.errors import TurbomillError, UsageError
from turbomill.quant import Method, QuantOptions, quantize
from turbomill.reports.render import write_report
from turbomill.reports.runs import Run, Variant, check_run_dir, model_card, new_run, save_run
from turbomill.reports.score_variant import VariantSpec
from turbomill.reports.server_process import server
from turbomill.reports.steps import Step, text_version

logger = logging.getLogger("turbomill.reports")

METHODS: tuple[Method, ...] = ("rtn", "awq", "gptq")
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class DemoOptions:
    """Sized so that all of it takes under ten minutes on two cores."""

    model: str = "demo"
    group: int = 64
    calib_dataset: str = "builtin"
    calib_samples: int = 32
    calib_seqlen: int = 512
    dataset: str = "builtin"
    windows: int = 8
    window_len: int = 512
    policies: tuple[str, ...] = ("16", "8", "4r")
    rounds: int = 3
    num_threads: int = 0
    max_tokens: int = 48
    session_len: int = 1024

    def quant_options(self, method: Method) -> QuantOptions:
        """4 bits; calibration for the methods that use it."""
        if method == "rtn":
            return QuantOptions(bits=4, group=self.group, overwrite=True)
        return QuantOptions(
            bits=4,
            group=self.group,
            calib_dataset=self.calib_dataset,
            calib_samples=self.calib_samples,
            calib_seqlen=self.calib_seqlen,
            overwrite=True,
        )


def run_demo(work_dir: Path, options: DemoOptions | None = None) -> Run:
    """Quantize, convert, score, serve and ask; leaves run.json, report.html and report.md in `work_dir`.

    What an earlier run made from the same inputs is reused. Raises TurbomillError.
    """
    options = options or DemoOptions()
    if importlib.util.find_spec("openai") is None:
        raise UsageError("demo: the openai client is missing; run `pip install 'turbomill[demo]'`")
    check_run_dir(work_dir)
    work_dir = work_dir.absolute()
    checkpoint = open_checkpoint(options.model)
    source = {"path": str(checkpoint.path), "fingerprint": checkpoint.fingerprint}
    checkpoints: dict[str, Path] = {"fp16": checkpoint.path}
    for method in METHODS:
        checkpoints[method] = _quantized(work_dir, options, method, source)
    stores = {name: _stored(work_dir, name, path) for name, path in checkpoints.items()}
    variants = [_scored(work_dir, options, name, stores) for name in stores]
    answer = ask(str(stores["awq"]), options)
    store = open_store(stores["fp16"])
    run = new_run(
        "demo",
        asdict(options),
        model=model_card(options.model, store),
        reference=model_card("fp16", store),
        windows={"source": options.dataset, "windows": options.windows, "length": options.window_len},
        variants=variants,
        question=QUESTION,
        answer=answer,
    )
    save_run(run, work_dir)
    write_report([run], work_dir / "report.html")
    return run


def _quantized(work_dir: Path, options: DemoOptions, method: Method, source: dict[str, str]) -> Path:
    settings = options.quant_options(method)
    inputs: dict[str, Any] = {"source": source, "method": method, "options": settings.describe()}
    if method != "rtn":
        inputs["text"] = text_version(options.calib_dataset)
    step = Step(f"quantize with {method.upper()}", work_dir / "checkpoints" / method, inputs)
    step.run(lambda output: quantize(options.model, output, method, settings))
    return step.output


def _stored(work_dir: Path, name: str, checkpoint: Path) -> Path:
    inputs = {"checkpoint": open_checkpoint(checkpoint).fingerprint}
    step = Step(f"convert {name}", work_dir / "stores" / name, inputs)
    step.run(lambda output: convert_checkpoint(checkpoint, output, force=True, dense=name == "fp16"))
    return step.output


def _scored(work_dir: Path, options: DemoOptions, name: str, stores: dict[str, Path]) -> Variant:
    spec = VariantSpec(
        name=name,
        store=str(stores[name]),
        reference=str(stores["fp16"]),
        policies=options.policies,
        dataset=options.dataset,
        windows=options.windows,
        window_len=options.window_len,
        rounds=options.rounds,
        num_threads=options.num_threads,
        cache=str(work_dir / "reference"),
    )
    fingerprints = {key: open_store(stores[key]).fingerprint for key in (name, "fp16")}
    inputs = {**asdict(spec), "fingerprints": fingerprints, "text": text_version(options.dataset)}
    step = Step(f"score {name}", work_dir / "scores" / f"{name}.json", inputs)
    step.run(lambda output: _run_child(spec, output))
    return Variant.model_validate_json(step.output.read_text(encoding="utf-8"))


def _run_child(spec: VariantSpec, output: Path) -> None:
    with tempfile.TemporaryDirectory() as temp:
        spec_file = Path(temp) / "spec.json"
        spec_file.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        command = [sys.executable, "-m", "turbomill.reports.score_variant", str(spec_file), str(output)]
        code = subprocess.run(command, stdout=sys.stderr).returncode
    if code:
        raise TurbomillError(f"scoring {spec.name} failed with exit code {code}; its own message is above")


def ask(store: str, options: DemoOptions, question: str = QUESTION) -> str:
    """Serve the store and ask one question through the openai client, greedily."""
    import openai

    arguments: Sequence[str] = (
        *("--session-len", str(options.session_len), "--max-batch-size", "4"),
        *("--num-threads", str(options.num_threads)),
    )
    logger.info("serve %s and ask: %s", store, question)
    with (
        server(store, "demo", arguments) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        try:
            reply = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=options.max_tokens,
            )
        except openai.OpenAIError as error:
            raise TurbomillError(f"the server did not answer: {error}") from error
    return cast(str, reply.choices[0].message.content or "").strip()


def demo_json(run: Run) -> dict[str, Any]:
    """What `turbomill demo --json` prints."""
    return {
        "variants": [variant.model_dump() for variant in run.variants],
        "question": run.question,
        "answer": run.answer,
    }
