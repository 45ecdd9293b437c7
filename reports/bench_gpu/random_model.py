"""A Llama of any size with random weights, handed to the native engine without a checkpoint.

Tensors are windows of a few files of random values, each at an offset of its own: the engine copies them to
the GPU one by one, so that every layer's weights are distinct bytes there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turbomill import _core

LLAMA3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "norm_eps": 1e-5,
    "rope_attention_factor": 1.0,
    "tie_word_embeddings": False,
}
SHIFT, WINDOWS = 4096, 512  # bytes between the windows of two tensors, and the most tensors
GROUP = 128
BLOCK = 1 << 22  # random elements before a file's values repeat


@dataclass
class RandomModel:
    """Files of random values under `folder`, and the tensors that lie in them."""

    folder: Path
    model: dict[str, Any]
    bits: int | None  # 4 or 8, in groups of 128: of linears, of 8 also of the output matrix; None: dense
    dtype: str = "float16"  # or "bfloat16": of dense weights, scales and so of activations
    tensors: list[_core.TensorRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        m = self.model
        hidden, inter, dim = m["hidden_size"], m["intermediate_size"], m["head_dim"]
        qkv = (m["num_heads"] + 2 * m["num_kv_heads"]) * dim
        linears = {
            "w_qkv": (qkv, hidden),
            "w_o": (hidden, m["num_heads"] * dim),
            "w_gate_up": (2 * inter, hidden),
            "w_down": (hidden, inter),
        }
        rng = np.random.default_rng(0)
        elements = max(m["vocab_size"] if self.bits == 8 else 0, 2 * inter) * hidden  # of the largest weight
        step = 0.032 / 2 ** (self.bits or 4)  # of the codes: weights are of one size at any number of bits
        normal = self._halves(rng.standard_normal(BLOCK, np.float32) * 0.02)
        self._files = {
            "normal": self._write("normal", normal, 2 * m["vocab_size"] * hidden),
            "codes": self._write(
                "codes", rng.integers(0, 256, BLOCK, np.uint8), elements * (self.bits or 4) // 8
            ),
            "scales": self._write(
                "scales", self._halves(rng.uniform(step, 2 * step, BLOCK)), elements // GROUP * 2
            ),
            "ones": self._write("ones", self._halves(rng.uniform(0.9, 1.1, hidden)), 2 * hidden),
        }
        frequencies = (500000.0 ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
        (self.folder / "rope").write_bytes(frequencies.tobytes())
        self._add("rope.inv_freq", "vector", "float32", (dim // 2,), str(self.folder / "rope"), 0)
        self._dense("tok_embeddings", m["vocab_size"], hidden)
        (self._packed if self.bits == 8 else self._dense)("output", m["vocab_size"], hidden)
        self._window("norm.weight", "vector", self.dtype, (hidden,), "ones")
        for layer in range(m["num_layers"]):
            prefix = f"layers.{layer}."
            for norm in ("attention_norm", "ffn_norm"):
                self._window(prefix + norm + ".weight", "vector", self.dtype, (hidden,), "ones")
            for name, (n, k) in linears.items():
                (self._packed if self.bits else self._dense)(prefix + name, n, k)

    def _halves(self, values: np.ndarray) -> np.ndarray:
        if self.dtype == "float16":
            return values.astype(np.float16)
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def _write(self, name: str, values: np.ndarray, nbytes: int) -> Path:
        path = self.folder / name
        total = nbytes + WINDOWS * SHIFT
        data = values.tobytes()
        with path.open("wb") as file:
            for start in range(0, total, len(data)):
                file.write(data[: total - start])
        return path

    def _add(
        self, name: str, layout: str, dtype: str, shape: tuple[int, ...], path: str, offset: int
    ) -> None:
        nbytes = int(np.prod(shape)) * {"float32": 4, self.dtype: 2, "uint8": 1}[dtype]
        self.tensors.append(_core.TensorRef(name, layout, dtype, shape, path, offset, nbytes))

    def _window(self, name: str, layout: str, dtype: str, shape: tuple[int, ...], source: str) -> None:
        offset = len(self.tensors) % WINDOWS * SHIFT
        self._add(name, layout, dtype, shape, str(self._files[source]), offset)

    def _packed(self, name: str, n: int, k: int) -> None:
        order = (4, 32, 16) if self.bits == 4 else (4, 8, 2, 64)
        self._window(name + ".qweight", f"w{self.bits}.n64k64", "uint8", (n // 64, k // 64, *order), "codes")
        self._window(name + ".scales", "group.n64", self.dtype, (n // 64, k // GROUP, 64), "scales")

    def _dense(self, name: str, n: int, k: int) -> None:
        self._window(name + ".weight", "dense.nk", self.dtype, (n, k), "normal")


def model_named(name: str, folder: Path) -> RandomModel:
    """Llama-3-8B's shape as "w4", "w8" (both with float16), "fp16" or "bf16"."""
    return RandomModel(
        folder, LLAMA3_8B, {"w4": 4, "w8": 8}.get(name), "bfloat16" if name == "bf16" else "float16"
    )
