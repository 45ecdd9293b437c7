"""The reference's distributions, computed once by our engine and kept on disk for every candidate.

What is kept of a position is the square root of each token's probability, in 65,536 even steps, and its five
likeliest tokens exactly. A step of the root is a coarse step of log p where p is small and a fine one where
p is large, which is what KL(p || q) asks for: each token adds the same error. The divergence of what is kept
from what was is at most V * STEP^2 / 6 nats a position (2e-6 for 50,000 tokens, 6e-6 for 150,000), and the
tokens that round to nothing weigh V * STEP^2 / 4 together at most. The roots' high bytes are nearly all zero
and the low ones small, so that zstd leaves less than half of 16 bits per token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbomill.convert.staged import StagedDirectory
from turbomill.errors import TurbomillError

logger = logging.getLogger("turbomill.reports")

LAYOUT = 2  # of the files; a change makes old caches unknown
# Rows of [*, V] at a time: about 25 MB of fp32 for a vocabulary of 50,000.
ROWS = 128
STEP = 1 / 65535
TOP = 5


def row_chunks(length: int) -> Iterator[slice]:
    """`length` positions, ROWS at a time."""
    for start in range(0, length, ROWS):
        yield slice(start, min(start + ROWS, length))


def likeliest(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """The likeliest tokens of logits [t, V], first the likeliest (of equals the first): [t, min(5, V)]."""
    rows = torch.from_numpy(logits)
    top = rows.topk(min(TOP, rows.shape[1]), dim=-1).indices
    first = rows.argmax(-1, keepdim=True)  # topk picks any of equals
    rest = torch.where(top == first, top[:, :1], top)[:, 1:]
    return torch.cat([first, rest], -1).to(torch.int32).numpy()


def _codec() -> pyarrow.Codec:
    return pyarrow.Codec("zstd", compression_level=1)


@dataclass(frozen=True)
class Reference:
    """What the reference said about one window."""

    chunks: tuple[bytes, ...]  # of ROWS positions each: compressed roots, uint16, low bytes before high ones
    top: NDArray[np.int32]  # [T, 5]
    vocab: int

    def probabilities(self, index: int) -> Tensor:
        """p of chunk `index`'s positions [t, V], fp32, normalised."""
        rows = min(ROWS, len(self.top) - index * ROWS)
        raw = _codec().decompress(self.chunks[index], decompressed_size=2 * rows * self.vocab)
        low, high = np.frombuffer(raw, np.uint8).reshape(2, rows, self.vocab)
        roots = torch.from_numpy(low | (high.astype(np.uint16) << 8)).to(torch.float32)
        p = (roots * STEP).square_()
        return p / p.sum(-1, keepdim=True)


def make_reference(logits: NDArray[np.float32]) -> Reference:
    """Keep what logits [T, V] say."""
    chunks, top = [], []
    codec = _codec()
    for rows in row_chunks(len(logits)):
        p = torch.softmax(torch.from_numpy(logits[rows]), -1)  # [t, V]
        codes = (p.sqrt_() / STEP).round_().to(torch.int32).numpy().astype(np.uint16)
        planes = np.stack([(codes & 255).astype(np.uint8), (codes >> 8).astype(np.uint8)])
        chunks.append(codec.compress(planes.tobytes(), asbytes=True))
        top.append(likeliest(logits[rows]))
    return Reference(tuple(chunks), np.concatenate(top), logits.shape[1])


def reference_key(store: str, windows: str, engine: dict[str, object], version: str) -> str:
    """Names a cache by all that can change it; `store` and `windows` are fingerprints."""
    content = json.dumps([LAYOUT, store, windows, engine, version], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ReferenceCache:
    """One directory per window, each of which appears whole: an interrupted pass goes on where it stopped."""

    path: Path

    def has(self, index: int) -> bool:
        """Whether window `index` is there."""
        return (self.path / str(index)).is_dir()

    def save(self, index: int, reference: Reference) -> None:
        """Keep one window: the chunks in one file, the rest with their sizes and checksums in another."""
        with StagedDirectory(self.path / str(index)) as directory:
            (directory / "roots.zst").write_bytes(b"".join(reference.chunks))
            np.savez(
                directory / "index.npz",
                top=reference.top,
                vocab=reference.vocab,
                sizes=[len(chunk) for chunk in reference.chunks],
                crc32=[zlib.crc32(chunk) for chunk in reference.chunks],
            )

    def load(self, index: int) -> Reference:
        """One window. Raises TurbomillError when the files are damaged."""
        directory = self.path / str(index)
        try:
            with np.load(directory / "index.npz") as found:
                top, vocab = found["top"], int(found["vocab"])
                ends = np.cumsum(found["sizes"]).tolist()
                sums = found["crc32"].tolist()
            data = (directory / "roots.zst").read_bytes()
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise TurbomillError(f"{directory}: unreadable ({error}); delete it and run again") from None
        starts = [0, *ends[:-1]]
        chunks = tuple(data[start:end] for start, end in zip(starts, ends, strict=True))
        if [zlib.crc32(chunk) for chunk in chunks] != sums:
            raise TurbomillError(f"{directory}: damaged, its checksum is wrong; delete it and run again")
        return Reference(chunks, top, vocab)

    def require_space(self, windows: int, length: int, vocab: int) -> None:
        """Raise TurbomillError when the disk will not hold the cache."""
        nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        free, needed = shutil.disk_usage(nearest).free, windows * length * vocab
        if needed > free:
            raise TurbomillError(
                f"{self.path}: the reference's logits need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
                "free; use fewer --windows, or set TURBOMILL_CACHE to a larger disk"
            )
        logger.info("reference logits: up to %.0f MB in %s", needed / 1e6, self.path)
