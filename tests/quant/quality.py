"""Measures what a quantized checkpoint lost, with transformers on its dequantized weights.

`python tests/quant/quality.py WORKDIR [rtn awq gptq]` quantizes the demo model by each method (4 bits,
group 64, 32 windows of 512 tokens) and prints perplexity, mean KL(fp16 || quantized) and top-1 agreement
on 24 windows of 1,024 tokens of the built-in evaluation text.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from turbomill.calib_data import load_windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.quant import QuantOptions, quantize


@torch.inference_mode()
def compare(reference: str | Path, quantized: list[Path], windows: Tensor) -> list[dict[str, float]]:
    """For each quantized checkpoint: perplexity, mean KL over positions and top-1 agreement on ids [n, T]."""
    full = load_dense_model(open_checkpoint(reference))
    small = [load_dense_model(open_checkpoint(path)) for path in quantized]
    rows = [{"reference_nll": 0.0, "nll": 0.0, "kl": 0.0, "top1": 0.0} for _ in quantized]
    for ids in windows:
        p = full(input_ids=ids[None]).logits[0].float().log_softmax(-1)  # [T, V]
        weight, top = p.exp(), p.argmax(-1)
        for model, row in zip(small, rows, strict=True):
            q = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
            row["reference_nll"] += float(F.nll_loss(p[:-1], ids[1:])) / len(windows)
            row["nll"] += float(F.nll_loss(q[:-1], ids[1:])) / len(windows)
            row["top1"] += float((top == q.argmax(-1)).float().mean()) / len(windows)
            row["kl"] += float(torch.sub(p, q, out=q).mul_(weight).sum(-1).mean()) / len(windows)
    for row in rows:
        row["reference_ppl"] = math.exp(row.pop("reference_nll"))
        row["ppl"] = math.exp(row.pop("nll"))
    return rows


def main(work_dir: str, *methods: str) -> None:
    windows = load_windows("builtin", open_checkpoint("demo").tokenizer(), 24, 1024, split="evaluation").ids
    options = QuantOptions(group=64, calib_samples=32, calib_seqlen=512, overwrite=True)
    names = methods or ("rtn", "awq", "gptq")
    paths = [Path(work_dir) / name for name in names]
    for method, path in zip(names, paths, strict=True):
        result = quantize("demo", path, method, options)  # type: ignore[arg-type]
        cpu = time.process_time()
        print(
            f"{method} {result.seconds:.0f} s (CPU {cpu:.0f} s so far), peak {result.peak_bytes / 1e6:.0f} MB"
        )
    for method, row in zip(names, compare("demo", paths, windows), strict=True):
        print(method, {key: round(value, 4) for key, value in row.items()}, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
