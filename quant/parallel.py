"""Independent pieces of work on all cores, each on one thread.

Splitting work into pieces scales better than letting every small tensor operation split itself: there is no
barrier after each operation, which on a shared machine waits for whichever thread the system has put aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def workers(device: torch.device) -> int:
    """How many pieces run at a time: the threads torch may use, or one where a GPU does the work."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def _one_thread() -> None:
    torch.get_num_threads()  # a thread's first look copies the process's setting: look before setting its own
    torch.set_num_threads(1)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, "turbomill-quant", initializer=_one_thread)
    # Setting one thread's number also changes what later threads copy: start all of them, then restore it.
    together = Barrier(threads)
    for started in [pool.submit(together.wait) for _ in range(threads)]:
        started.result()
    torch.set_num_threads(threads)
    return pool


ROWS = 768  # of a weight in work together: they stay in the cache
ROWS_GPU = 1 << 15  # there the number of launches counts, not what fits a cache


def row_parts(rows: int, device: torch.device) -> list[slice]:
    """Equal parts of at most so many rows as suit the device, an even number on a CPU. Not the machine's
    number of threads: a result must not depend on it."""
    if device.type == "cpu":
        count = 2 * -(-rows // (2 * ROWS))
    else:
        count = -(-rows // ROWS_GPU)
    step = -(-rows // count)
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def spread(function: Callable[[Item], Result], items: Iterable[Item], device: torch.device) -> list[Result]:
    """function(item) for each item, in order, without gradients, its tensors being on `device`.

    The first exception is raised.
    """
    pieces, threads = list(items), workers(device)
    if len(pieces) < 2 or threads < 2:
        with torch.no_grad():
            return [function(piece) for piece in pieces]
    return list(_pool(threads).map(torch.no_grad()(function), pieces))
