"""Mutations of files, and a reader that must answer or say what is wrong, soon and in bounded memory."""

from __future__ import annotations

import copy
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from turbomill.errors import TurbomillError

SECONDS, MEMORY = 10, 2 << 30
NUMBERS = [0, 1, 2, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "x", "float16", "../../etc/passwd", "\x00", "\ud800", "re:(", "a\nb"),
    *([], [0], [[]], [1, -1], ["x"], {}, {"x": 1}, {"rope_type": "yarn"}),
]


@st.composite
def mutated_bytes(draw: st.DrawFn, content: bytes, head: int) -> bytes:
    """A few edits of `content`, most of them within the first `head` bytes."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(len(data), head)))
        match draw(st.sampled_from(["byte", "bytes", "number", "insert", "delete", "truncate", "repeat"])):
            case "byte" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "bytes":
                data[at : at + 4] = draw(st.binary(min_size=4, max_size=4))
            case "number":
                size = draw(st.sampled_from([4, 8]))
                data[at : at + size] = (draw(st.sampled_from(NUMBERS)) % 256**size).to_bytes(size, "little")
            case "insert":
                data[at:at] = draw(st.binary(max_size=9))
            case "delete":
                del data[at : at + draw(st.integers(1, 40))]
            case "truncate":
                del data[at:]
            case "repeat":
                data[at:at] = data[max(0, at - draw(st.integers(1, 60))) : at]
    return bytes(data)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


@st.composite
def mutated_json(draw: st.DrawFn, value: Any) -> Any:
    """One to three values replaced, removed, moved or nested."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = sorted(_places(value), key=repr)
        if not places:
            return value
        *path, last = draw(st.sampled_from(places))
        parent = value
        for key in path:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "nest", "add", "other"])):
            case "replace":
                parent[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "remove":
                del parent[last]
            case "nest":
                parent[last] = [parent[last]]
            case "add" if isinstance(parent, dict):
                name = draw(st.sampled_from(["", "x", f"{last}x"]))
                parent[name] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "other" if isinstance(parent, dict):
                parent[last] = copy.deepcopy(parent[draw(st.sampled_from(sorted(parent, key=repr)))])
    return value


@contextmanager
def bounded() -> Iterator[None]:
    """MemoryError beyond 2 GiB more than now, TimeoutError after ten seconds."""

    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


def answers_or_says(read: Callable[[], object]) -> bool:
    """Whether `read` had an answer; else its error is one of ours, in one line. Anything else is raised."""
    try:
        with bounded():
            read()
        return True
    except TurbomillError as error:
        assert "\n" not in str(error), error
        return False
