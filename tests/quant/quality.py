"""Measures what quantized checkpoints lost, with transformers on their dequantized weights, beside the peers.

`python tests/quant/quality.py WORKDIR [NAME ...] [--text FILE] [--model MODEL] [--device cuda]` quantizes
the demo model, or MODEL, by each of VARIANTS (4 bits, group 64, 32 windows of 512 tokens of the built-in
text, unless the variant says otherwise). It prints perplexity, KL(fp16 || quantized) and top-1 agreement on
24 windows of 1,024 tokens of the built-in evaluation text, and the KL on other texts: Python source code,
and each FILE (12 windows of 1,024 tokens). The peers' figures are of Python 3.11's texts.
"""

from __future__ import annotations

import argparse
import asyncio.base_events
import difflib
import http.client
import inspect
import math
import tarfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turbomill.calib_data import load_windows, token_ids
from turbomill.calib_data.windows import windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.quant import QuantOptions, quantize
from turbomill.quant.options import Method, QuantResult


@torch.inference_mode()
def compare(
    reference: str | Path, quantized: list[Path], rows_of_ids: Tensor, device: str = "cpu"
) -> list[dict[str, float]]:
    """For each quantized checkpoint: perplexity, mean KL over positions and top-1 agreement on ids [n, T]."""
    full = load_dense_model(open_checkpoint(reference)).to(device)
    small = [load_dense_model(open_checkpoint(path)).to(device) for path in quantized]
    rows = [{"reference_nll": 0.0, "nll": 0.0, "kl": 0.0, "top1": 0.0} for _ in quantized]
    for ids in rows_of_ids.to(device):
        p = full(input_ids=ids[None]).logits[0].float().log_softmax(-1)  # [T, V]
        weight, top = p.exp(), p.argmax(-1)
        for model, row in zip(small, rows, strict=True):
            q = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
            row["reference_nll"] += float(F.nll_loss(p[:-1], ids[1:])) / len(rows_of_ids)
            row["nll"] += float(F.nll_loss(q[:-1], ids[1:])) / len(rows_of_ids)
            row["top1"] += float((top == q.argmax(-1)).float().mean()) / len(rows_of_ids)
            row["kl"] += float(torch.sub(p, q, out=q).mul_(weight).sum(-1).mean()) / len(rows_of_ids)
    for row in rows:
        row["reference_ppl"] = math.exp(row.pop("reference_nll"))
        row["ppl"] = math.exp(row.pop("nll"))
    return rows


# Name -> method, and the options that differ.
VARIANTS: dict[str, tuple[Method, dict[str, Any]]] = {
    "rtn": ("rtn", {}),
    "awq": ("awq", {}),
    "awq-plain": ("awq", {"correct": False}),
    "gptq": ("gptq", {}),
    "gptq-plain": ("gptq", {"correct": False}),
    "auto": ("auto", {}),
    "auto-mixed-text": ("auto", {"calib_dataset": "builtin,free"}),
    "auto-free": ("auto", {"calib_dataset": "free"}),
    "auto-self": ("auto", {"calib_dataset": "self"}),
    "gptq-plain-self": ("gptq", {"correct": False, "calib_dataset": "self"}),
    "awq-plain-self": ("awq", {"correct": False, "calib_dataset": "self"}),
    "auto-4.4": ("auto", {"budget": 4.4}),
    "auto-default": ("auto", {"calib_dataset": "builtin,free", "calib_samples": 64}),
    "rtn-3": ("rtn", {"bits": 3}),
    "awq-plain-3": ("awq", {"correct": False, "bits": 3, "format": "gptq"}),
    "gptq-plain-3": ("gptq", {"correct": False, "bits": 3}),
    "auto-3": ("auto", {"bits": 3}),
    "rtn-8": ("rtn", {"bits": 8}),
    "auto-8": ("auto", {"bits": 8}),
}
# 4 bits, group 64, the same model and texts (CPython 3.11's): perplexity, KL, top-1, KL on source code.
PEERS = {
    "llm-compressor 0.14.0.1 GPTQ (its default, symmetric)": (14.546, 0.1879, 0.800, None),
    "GPTQModel 7.6 GPTQ (its default, symmetric)": (13.961, 0.1564, 0.812, 0.217),
    "llm-compressor GPTQ (asymmetric, mse observer, static act-order)": (13.059, 0.0922, 0.852, 0.123),
    "GPTQModel GPTQ (asymmetric, mse 2.4)": (13.235, 0.1056, 0.842, 0.139),
    "llm-compressor AWQ (asymmetric, no clip)": (13.782, 0.1386, 0.814, 0.150),
    "GPTQModel AWQ (asymmetric, clip)": (13.530, 0.1239, 0.827, 0.141),
}
SOURCES = (argparse, asyncio.base_events, http.client, tarfile, difflib)


def texts(tokenizer: Any, files: list[Path]) -> dict[str, Tensor]:
    """Evaluation windows int64 [n, 1024] by name; the first is the built-in text's."""
    code = "\n\n".join(inspect.getsource(module) for module in SOURCES)
    found = {
        "builtin": load_windows("builtin", tokenizer, 24, 1024, split="evaluation").ids,
        "source code": windows(token_ids(tokenizer, [code]), 12, 1024, source="source code"),
    }
    for file in files:
        ids = token_ids(tokenizer, [file.read_text(encoding="utf-8")])
        found[file.name] = windows(ids, 12, 1024, source=file.name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="other texts to measure the KL on")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", help="where to quantize and to measure")
    given = parser.parse_args()
    evaluated = texts(open_checkpoint(given.model).tokenizer(), given.text)
    names = given.names or ("rtn", "awq-plain", "awq", "gptq-plain", "gptq", "auto", "auto-mixed-text")
    results = [_quantized(name, given.model, given.work_dir / name, given.device) for name in names]
    paths = [result.work_dir for result in results]
    scores = {text: compare(given.model, paths, ids, given.device) for text, ids in evaluated.items()}
    others = [text for text in evaluated if text != "builtin"]
    columns = ["method", "seconds", "peak MB", "ppl", "KL", "top-1", *(f"KL, {text}" for text in others)]
    rows = [
        [name, "", "", str(ppl), str(kl), str(top1), str(code or ""), *([""] * (len(others) - 1))]
        for name, (ppl, kl, top1, code) in PEERS.items()
    ]
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        row = scores["builtin"][index]
        rows.append(
            [name, f"{result.seconds:.0f}", f"{result.peak_bytes / 1e6:.0f}"]
            + [f"{row['ppl']:.3f}", f"{row['kl']:.4f}", f"{row['top1']:.3f}"]
            + [f"{scores[text][index]['kl']:.4f}" for text in others]
        )
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(row)} |")


def _quantized(name: str, model: str, path: Path, device: str) -> QuantResult:
    method, changes = VARIANTS[name]
    base = {"group": 64, "calib_samples": 32, "calib_seqlen": 512, "overwrite": True, "device": device}
    before = time.process_time()
    result = quantize(model, path, method, QuantOptions(**{**base, **changes}))
    print(f"{name}: {result.seconds:.0f} s, CPU {time.process_time() - before:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
