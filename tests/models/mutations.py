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


# What to do, where (of a million), and with which number or bytes: drawn without a look at the content.
_WHERE, _COUNT = st.integers(0, 10**6), st.integers(0, 10**6)
_BYTE_EDIT = st.tuples(
    st.sampled_from(["byte", "bytes", "number", "insert", "delete", "truncate", "repeat"]),
    *(_WHERE, _COUNT, st.binary(max_size=9)),
)
_JSON_EDIT = st.tuples(
    st.sampled_from(["replace", "replace", "remove", "nest", "add", "other"]), *(_WHERE, _COUNT, _COUNT)
)
BYTE_EDITS, JSON_EDITS = (st.lists(edit, min_size=1, max_size=3) for edit in (_BYTE_EDIT, _JSON_EDIT))


def mutated_bytes(content: bytes, head: int, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """`content` after the edits, all of them within the first `head` bytes."""
    data = bytearray(content)
    for kind, where, count, some in edits:
        at = where * min(len(data), head) // 10**6
        match kind:
            case "byte":
                data[at : at + 1] = bytes(byte ^ 1 << count % 8 for byte in data[at : at + 1])
            case "bytes":
                data[at : at + len(some)] = some
            case "number":
                size = 4 + count % 2 * 4
                data[at : at + size] = (NUMBERS[count % len(NUMBERS)] % 256**size).to_bytes(size, "little")
            case "insert":
                data[at:at] = some
            case "delete":
                del data[at : at + 1 + count % 40]
            case "truncate":
                del data[at:]
            case "repeat":
                data[at:at] = data[max(0, at - 1 - count % 60) : at]
    return bytes(data)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


def mutated_json(value: Any, edits: list[tuple[str, int, int, int]]) -> Any:
    """`value` with one to three values replaced, removed, moved or nested."""
    value = copy.deepcopy(value)
    for kind, where, which, other in edits:
        places = sorted(_places(value), key=repr)
        if not places:
            return value
        *path, last = places[where * (len(places) - 1) // 10**6]
        parent = value
        for key in path:
            parent = parent[key]
        chosen = copy.deepcopy(VALUES[which % len(VALUES)])
        match kind:
            case "replace":
                parent[last] = chosen
            case "remove":
                del parent[last]
            case "nest":
                parent[last] = [parent[last]]
            case "add" if isinstance(parent, dict):
                parent[["", "x", f"{last}x"][other % 3]] = chosen
            case "other" if isinstance(parent, dict):
                keys = sorted(parent, key=repr)
                parent[last] = copy.deepcopy(parent[keys[other % len(keys)]])
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
