"""How many KV blocks `cache_max_entry_count` buys: a share of free memory, bytes, or a number of blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turbomill.errors import UsageError

if TYPE_CHECKING:
    from turbomill.engine.config import EngineConfig

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B", re.IGNORECASE)
# Blocks beyond what every running sequence can fill, so that a full batch never waits for one.
SLACK = 8


@dataclass(frozen=True)
class CacheSize:
    """`cache_max_entry_count`, read: exactly one field is set."""

    share: float | None = None  # of the free memory
    nbytes: int | None = None
    blocks: int | None = None

    @classmethod
    def parse(cls, value: float | int | str) -> CacheSize:
        """Read 0.8 (a share), "20GiB" (bytes) or 512 (blocks). Raises UsageError."""
        text = str(value).strip()
        if size := SIZE.fullmatch(text):
            nbytes = int(float(size[1]) * UNITS[size[2].upper()])
            if nbytes > 0:
                return cls(nbytes=nbytes)
        elif re.fullmatch(r"\d+", text) and int(text) > 0:
            return cls(blocks=int(text))
        elif re.fullmatch(r"\d*\.\d+|\d+\.\d*", text) and 0 < float(text) <= 1:
            return cls(share=float(text))
        raise UsageError(
            f"cache_max_entry_count is {value!r}, expected a share of free memory such as 0.8, "
            "a size such as 20GiB, or a number of blocks such as 512"
        )


def show_bytes(nbytes: float) -> str:
    """A size in the largest fitting binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def cache_block_count(
    config: EngineConfig, session_len: int, block_bytes: int, free_bytes: int, *, quantizable: bool = True
) -> int:
    """Blocks to allocate: what the budget buys, at most what `max_batch_size` full sessions can use.

    `block_bytes` is one block over all layers; `quantizable`, whether it may have fewer. Raises UsageError
    when not even one session fits.
    """
    size = CacheSize.parse(config.cache_max_entry_count)
    per_session = -(-session_len // config.cache_block_seq_len)
    useful = config.max_batch_size * per_session + SLACK
    if size.blocks is not None:
        count, budget = size.blocks, f"{size.blocks} blocks ({show_bytes(size.blocks * block_bytes)})"
    elif size.nbytes is not None:
        count, budget = size.nbytes // block_bytes, show_bytes(size.nbytes)
    else:
        nbytes = int((size.share or 0.0) * free_bytes)
        count, budget = (
            nbytes // block_bytes,
            f"{size.share} of {show_bytes(free_bytes)} free = {show_bytes(nbytes)}",
        )
    if count < per_session:
        fits = count * config.cache_block_seq_len
        smaller = f"--session-len {fits} or less, " if fits > 1 else ""
        raise UsageError(
            f"the KV cache of one session of {session_len} tokens needs "
            f"{show_bytes(per_session * block_bytes)} ({per_session} blocks), but "
            f"cache_max_entry_count allows {budget}: use {smaller}"
            "a larger --cache-max-entry-count" + (", or --quant-policy 8 or 4" if quantizable else "")
        )
    return min(count, useful)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None


def free_memory() -> int:
    """Bytes this process may still allocate: what the machine has available, under the container's limit."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    free = int(match[1]) * 1024 if match else 0
    for limit_path, used_path, stat_path, inactive in (
        (
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory.current",
            "/sys/fs/cgroup/memory.stat",
            "inactive_file",
        ),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _read_int(limit_path), _read_int(used_path)
        if limit is not None and used is not None:
            # Page cache counts as used, but the kernel gives it back.
            cached = re.search(rf"^{inactive} (\d+)", Path(stat_path).read_text(), re.MULTILINE)
            free = min(free, limit - used + (int(cached[1]) if cached else 0))
    return max(free, 0)
