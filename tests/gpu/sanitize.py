"""Every kernel once or twice at small sizes, for compute-sanitizer: under it, the tests would take hours.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [part of a group's name ...]

Results are not compared here; the tests do that.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / folder) for folder in ("engine/native", "models"))]

from store_packing import pack_bytes, pack_codes, pack_params  # noqa: E402

from turbomill import _core  # noqa: E402

gpu = _core.kernels_cuda
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def halves(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float16).view(np.uint16)


def elementwise() -> None:
    for h in (64, 65):
        gpu.rms_norm(normal(3, h), normal(3, h), normal(h), 1e-5, "float16")
        gpu.narrow_rms_norm(normal(3, h), normal(h), 1e-5, "float16")
    for activation in ("silu", "gelu_tanh"):
        gpu.gate(normal(3, 48), activation, "float16")
    gpu.softcap(normal(100), 3.0)
    for bits in (8, 4):
        gpu.kv_write(normal(9, 64), bits)


def attention_of(d: int, bits: int, dtype: str = "float16", **variant: float) -> None:
    """A prompt, a chunk, and decodes after it."""
    for context, chunk in ((0, 999), (100, 30), (149, 1)):
        gpu.attention(
            normal(150, 8 * d),
            4,
            2,
            d,
            context,
            quant_policy=bits % 16,
            cache_dtype=dtype,
            dtype=dtype,
            inv_freq=[0.1] * (d // 2),
            chunk=chunk,
            **variant,
        )


def attention_plain() -> None:
    for d in (64, 128, 256, 96, 24):
        attention_of(d, 16)
    attention_of(64, 16, "float32")


def attention_codes() -> None:
    for bits in (8, 4):
        for d in (128, 256, 80):
            attention_of(d, bits)


def attention_variants() -> None:
    for d in (64, 96, 256, 24):
        attention_of(d, 16, window=70, softcap=3.0, q_norm=[1.0] * d, k_norm=[1.0] * d)


def attention_parts() -> None:
    """Keys of a sequence over several blocks, whose parts meet."""
    for bits in (0, 8):
        qkvs = [normal(t, 8 * 64) for t in (900, 3, 260)]
        gpu.attention_batch(
            qkvs, [1, 1, 1], 4, 2, 64, quant_policy=bits, cache_dtype="float16", dtype="float16"
        )
    qkvs = [normal(t, 8 * 96) for t in (700, 40)]
    gpu.attention_batch(qkvs, [1, 30], 4, 2, 96, cache_dtype="float16", dtype="float16")


def w4(n: int, k: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = -(-k // 64) * 64 // group
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, (n, groups)).astype(np.float32)
    zeros = rng.integers(0, 16, (n, groups)).astype(np.float32)
    return pack_codes(codes), halves(pack_params(scales)), halves(pack_params(zeros))


def linears() -> None:
    for rows, n, k, group in ((3, 80, 192, 32), (20, 80, 192, 64), (70, 48, 128, 128)):
        types = {"dtype": "float16", "scale_dtype": "float16", "out_dtype": "float16"}
        for way in ("in_place", "as_dense"):
            gpu.w4_linear(normal(rows, k), *w4(n, k, group), n, k, **types, way=way)
        gpu.dense_linear(normal(rows, k), normal(n, k), normal(n), dtype="float16", out_dtype="float16")
    for rows in (3, 12, 20, 40):
        for n in (144, 17024):
            x, w = normal(rows, 136), normal(n, 136)
            for out in ("float16", "float32"):
                gpu.dense_linear(x, w, normal(n), dtype="float16", out_dtype=out)
            gpu.dense_linear(x, w, normal(n), dtype="float16", out_dtype="float16", gated=True)


def w8(n: int, k: int, group: int, kind: str = "") -> tuple:
    """A weight as gpu.w8_linear takes it. Kind: "zeros", "minima" or neither."""
    shape = (n, -(-k // 64) * 64 // group)
    codes = pack_bytes(rng.integers(0, 256, (n, k), dtype=np.uint8))
    scales = halves(pack_params(rng.uniform(0.001, 0.01, shape).astype(np.float32)))
    beside = halves(pack_params(rng.integers(0, 256, shape).astype(np.float32)))
    return codes, scales, beside if kind == "zeros" else None, beside if kind == "minima" else None, n, k


def linears8() -> None:
    types = {"dtype": "float16", "scale_dtype": "float16"}
    for n, k, group in ((80, 192, 32), (200, 320, 64)):
        for kind in ("", "zeros", "minima"):
            weight = w8(n, k, group, kind)
            for rows in (3, 12, 20, 70):
                for splits in (1, 3):
                    options = {"out_dtype": "float16", "way": "in_place", "splits": splits}
                    gpu.w8_linear(normal(rows, k), *weight, **types, **options)
            gpu.w8_linear(normal(70, k), *weight, **types, out_dtype="float16", way="as_dense", room=128 * k)
            gpu.embed_w8([0, n - 1, -1], [5], *weight, scale_dtype="float16")


def fused() -> None:
    """Every plan's kernel, whole and with K split."""
    types = {"dtype": "float16", "scale_dtype": "float16", "out_dtype": "float16"}
    for group in (32, 128):
        weight = w4(144, 384, group)
        for kernel in gpu.fused_kernels(4):
            for splits in (1, 3) if kernel[0] != 7 else (1,):
                for way in ("fused", "gated"):
                    plan = (*kernel, splits)
                    gpu.w4_linear(normal(21, 384), *weight, 144, 384, **types, way=way, plan=plan)


def fused8() -> None:
    types = {"dtype": "float16", "scale_dtype": "float16", "out_dtype": "float16"}
    for group, kind in ((32, "minima"), (32, "zeros"), (128, "")):
        weight = w8(144, 384, group, kind)
        for kernel in gpu.fused_kernels(8):
            if kind == "minima" and kernel[1] <= 16:
                continue
            for splits in (1, 3) if kernel[0] != 7 else (1,):
                for way in ("fused", "gated"):
                    plan = (*kernel, splits)
                    gpu.w8_linear(normal(21, 384), *weight, **types, way=way, plan=plan)


def experts() -> None:
    logits = normal(40, 8)
    gpu.moe_route(logits, 3, True)
    for scale in (1, 2, 5, 12, 30, 60):
        counts = np.array([0, 3, 1, 0, 9, 2, 0, 5]) * scale
        offsets = np.cumsum([0, *counts]).astype(np.int32)
        x = normal(int(offsets[-1]), 192)
        for way in ("", "fused", "gated"):
            if not way or gpu.w4_fused_runs():
                gpu.grouped_dense(x, offsets, normal(8, 80, 192), "float16", way)
        stacked = [np.stack(parts) for parts in zip(*(w4(80, 192, 64) for _ in range(8)), strict=True)]
        for way in ("in_place", "fused", "gated"):
            if way == "in_place" or gpu.w4_fused_runs():
                gpu.grouped_w4(x, offsets, *stacked, 80, 192, "float16", way)
    gpu.grouped_dense(normal(5, 30), np.array([0, 2, 5], np.int32), normal(2, 33, 30), "float32")
    places = np.arange(12, dtype=np.int32)
    gpu.moe_combine(normal(12, 64), places, normal(4, 3), normal(4), normal(4, 64), "float16")


def sampling() -> None:
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.9)):
        gpu.sample(normal(3, 5000), 1.0, top_k, top_p, 1, 2)
    gpu.logprobs(normal(3, 1000), [1, 2, 3], 5)
    edits = [(1, 1, 0.5, True, False)]
    gpu.edit_logits(normal(2, 1000), [(0, 1.1, 0.1, 0.1, edits, [(1, 2)], [3, 4], True)], [1, 2])


def engines() -> None:
    """Whole steps, recorded ones among them."""
    import torch
    from architectures import CASES
    from native_engine import Native, store_of, tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(Path(folder) / "llama", torch.float16, head_dim=64)
        for name in ("gemma2", "qwen2-moe"):
            CASES[name].make(Path(folder) / name, torch.float16)
        for name in ("llama", "gemma2", "qwen2-moe"):
            with Native(store_of(Path(folder) / name), device="cuda", cache_dtype="float16") as engine:
                requests = [engine.submit(list(range(3, 3 + n)), 6, temperature=0.5) for n in (5, 70, 9)]
                assert all(len(engine.tokens(request)) == 6 for request in requests)


GROUPS: list[Callable[[], None]] = [
    elementwise,
    attention_plain,
    attention_codes,
    attention_variants,
    attention_parts,
    linears,
    linears8,
    fused,
    fused8,
    experts,
    sampling,
    engines,
]

if __name__ == "__main__":
    for group in GROUPS:
        if len(sys.argv) > 1 and not any(part in group.__name__ for part in sys.argv[1:]):
            continue
        if group in (fused, fused8) and not gpu.w4_fused_runs():
            continue
        start = time.monotonic()
        group()
        print(f"{group.__name__}: {time.monotonic() - start:.1f} s", flush=True)
