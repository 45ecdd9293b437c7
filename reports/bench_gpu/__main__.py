"""`make bench-gpu`: run the benchmarks, write JSON, print the table."""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

from turbomill import _core
from turbomill.reports.bench_gpu import end_to_end, kernels, table
from turbomill.reports.bench_gpu.random_model import model_named

SECTIONS = ("copy", "linears", "linears8", "linears16", "experts", "decodes", "prompts", "end_to_end")


def main() -> None:
    """Measure, save after each section, print at the end."""
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_gpu.json"), help="where the JSON goes")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, by commas")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="of linears")
    parser.add_argument(
        "--engines", default="w4:0,w4:8,w4:4,w8:0,bf16:0", help="w4, w8, fp16 or bf16:KV-BITS, by commas"
    )
    parser.add_argument("--workloads", default=",".join(end_to_end.WORKLOADS), help="of engines, by commas")
    parser.add_argument("--repeats", type=int, default=9, help="graph replays a kernel's median is of")
    parser.add_argument("--runs", type=int, default=3, help="runs an engine's median is of")
    arguments = parser.parse_args()
    gpus = _core.cuda_devices() if "cuda" in _core.build_info()["backends"] else []
    if not gpus:
        raise SystemExit("bench-gpu: needs a build with the cuda backend, and a GPU")
    sections = arguments.sections.split(",")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"device": gpus[0]["name"], "date": datetime.date.today().isoformat()}
    if "copy" in sections:
        results["copy_bytes_per_second"] = _core.kernels_cuda.bench_copy()
    for section, bits in (("linears", 4), ("linears8", 8), ("linears16", 16)):
        if section in sections:
            results[section] = {
                dtype + (", overlapping" if overlap else ""): kernels.linears(
                    dtype, arguments.repeats, overlap, bits
                )
                for dtype in arguments.dtypes.split(",")
                for overlap in (False, True)
            }
    if "experts" in sections:
        results["experts"] = kernels.experts("bfloat16", arguments.repeats)
    if "decodes" in sections:
        results["decodes"] = kernels.decodes("float16", arguments.repeats)
    if "prompts" in sections:
        results["prompts"] = kernels.prompts("float16", arguments.repeats)
    arguments.out.write_text(json.dumps(results, indent=1))
    if "end_to_end" in sections:
        results["end_to_end"] = []
        for weights in dict.fromkeys(engine.partition(":")[0] for engine in arguments.engines.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                model = model_named(weights, Path(folder))
                for engine in arguments.engines.split(","):
                    if engine.partition(":")[0] != weights:
                        continue
                    bits = int(engine.partition(":")[2])
                    workloads = arguments.workloads.split(",")
                    run = end_to_end.measure(model, bits, "cuda:0", arguments.runs, workloads)
                    name = f"turbomill {weights}, KV {f'int{bits}' if bits else '16'}"
                    results["end_to_end"].append({"run": name} | run)
                    arguments.out.write_text(json.dumps(results, indent=1))
    print(table.render(results))


if __name__ == "__main__":
    main()
