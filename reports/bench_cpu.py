"""The engine on a CPU beside llama.cpp: the same GGUF file, prompts' lengths, threads, in turns.

`python -m turbomill.reports.bench_cpu [MODEL.gguf] [--peer-python PYTHON] [--cpu-activations KIND]`. The peer
is llama-cpp-python, in PYTHON's environment (this one's by default); without it ours are measured alone, and
a line says so. Each load runs `--rounds` times on each side, the two taking turns so that what else the
machine does meets both; medians are compared. Generated text is greedy on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turbomill import console
from turbomill.convert.source import resolve_model
from turbomill.convert.store import convert_checkpoint
from turbomill.engine.config import CPU_ACTIVATIONS, EngineConfig
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import UsageError
from turbomill.reports.bench_engine import Load, run_load

# What is measured of each load: prompts alone, or the tokens that follow.
LOADS = {
    "prefill 512 tokens": (Load(1, 512, 2), "prefill"),
    "decode, 1 stream at 128 tokens": (Load(1, 128, 64), "decode"),
    "decode, 8 streams": (Load(8, 128, 48), "decode"),
    "decode, 32 streams": (Load(32, 128, 32), "decode"),
}


class Peer:
    """llama_peer.py in a process of its own. Raises UsageError where llama-cpp-python is not installed."""

    def __init__(self, python: str, model: Path, threads: int, session: int, sequences: int) -> None:
        script = Path(__file__).with_name("llama_peer.py")
        command = [python, str(script), str(model), str(threads), str(session), str(sequences)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            self.version = self._answer()["version"]
        except UsageError:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            reason = self._process.stderr.read().strip().splitlines() or ["no output"]
            raise UsageError(f"llama-cpp-python: {reason[-1]}")
        return json.loads(line)

    def run(self, load: Load, seed: int) -> tuple[float, float]:
        """Prefill and decode tokens/s."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asdict(load), "seed": seed}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["prefill_tok_s"], answer["decode_tok_s"]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def bench_cpu(
    model: str, *, peer_python: str, activations: str, threads: int, rounds: int, only: str = ""
) -> dict[str, Any]:
    """Measure; {"peer": version or why there is none, "rows": [{"load", "ours", "peer"}]} in tokens/s."""
    path = resolve_model(model)
    loads = {name: load for name, load in LOADS.items() if only in name}
    session = max(load.prompt_tokens + load.completion_tokens for load, _ in loads.values())
    batch = max(load.batch for load, _ in loads.values())
    found: dict[str, Any] = {"activations": activations, "threads": threads, "rows": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = convert_checkpoint(path, folder / "store")
        config = EngineConfig(
            session_len=session,
            max_batch_size=batch,
            num_threads=threads,
            device="cpu",
            cpu_activations=activations,
            enable_prefix_caching=False,
        )
        engine = stack.enter_context(TurbomindEngine(store, config, reason="it is measured"))
        try:
            peer = stack.enter_context(Peer(peer_python, path, threads, session, batch))
            found["peer"] = f"llama-cpp-python {peer.version}"
        except (UsageError, OSError) as error:
            peer, found["peer"] = None, str(error)
        vocab = store.model["vocab_size"]
        for name, (load, kind) in loads.items():
            ours: list[float] = []
            theirs: list[float] = []
            for seed in range(-1, rounds):  # the first, a warm-up, does not count
                ours.append(asyncio.run(run_load(engine, load, vocab, seed))[kind == "decode"])
                if peer:
                    theirs.append(peer.run(load, seed)[kind == "decode"])
            row = {"load": name, "ours": statistics.median(ours[1:])}
            row["peer"] = statistics.median(theirs[1:]) if theirs else None
            found["rows"].append(row)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file, or demo")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with llama-cpp-python")
    parser.add_argument("--cpu-activations", choices=CPU_ACTIVATIONS, default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    console.setup_logging()
    found = bench_cpu(
        given.model,
        peer_python=given.peer_python,
        activations=given.cpu_activations,
        threads=given.threads,
        rounds=given.rounds,
        only=given.only,
    )
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['peer']}; ours with activations {given.cpu_activations}; {given.threads} threads\n")
    print("| tokens/s | llama.cpp | turbomill | ratio |\n|---|---|---|---|")
    for row in found["rows"]:
        ratio = f"{row['ours'] / row['peer']:.2f}" if row["peer"] else ""
        theirs = f"{row['peer']:.0f}" if row["peer"] else ""
        print(f"| {row['load']} | {theirs} | {row['ours']:.0f} | {ratio} |")


if __name__ == "__main__":
    main()
