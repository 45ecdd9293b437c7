"""The pages of the KV cache: who uses them, and which of them a prompt that begins alike can share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as Tokens

import numpy as np

from turbomill.engine.pytorch.records import Sequence


class BlockPool:
    """Pages 0 to total - 1 of `block_len` tokens each: free, used, or cached (used by nobody, but known).

    A page is known by what it and all pages before it hold: the digest of those tokens. Only whole pages are
    shared.
    """

    def __init__(self, total: int, block_len: int, caching: bool) -> None:
        self.total, self.block_len, self._caching = total, block_len, caching
        self._free = list(reversed(range(total)))
        self._users = [0] * total
        self._page_of: dict[bytes, int] = {}  # what it holds -> page
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, the first to go first
        self.evictions = 0

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody uses, kept for prompts that begin alike."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return self.free + self.cached

    def needed(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.block_len)

    def match(self, sequence: Sequence) -> list[int]:
        """The known pages that hold the beginning of a sequence; it need not compute them."""
        pages: list[int] = []
        key = b""
        for index in range(sequence.reusable // self.block_len if self._caching else 0):
            key = self._key(key, sequence.tokens, index)
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def idle(self, pages: list[int]) -> int:
        """How many of these nobody uses."""
        return sum(self._users[page] == 0 for page in pages)

    def share(self, sequence: Sequence, pages: list[int]) -> None:
        """Begin a sequence with pages that `match` gave."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        sequence.blocks = list(pages)
        sequence.keys = [self._key_of[page] for page in pages]
        sequence.computed = len(pages) * self.block_len

    def extend(self, sequence: Sequence, count: int) -> None:
        """Give a sequence `count` more pages; there must be as many. Cached ones are forgotten for it."""
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
                self.evictions += 1
            self._users[page] = 1
            sequence.blocks.append(page)

    def record(self, sequence: Sequence) -> None:
        """Let others find the whole pages that a sequence has computed."""
        while self._caching and (len(sequence.keys) + 1) * self.block_len <= sequence.computed:
            index = len(sequence.keys)
            key = self._key(sequence.keys[-1] if index else b"", sequence.tokens, index)
            sequence.keys.append(key)
            if key not in self._page_of:  # else another page has the same
                page = sequence.blocks[index]
                self._page_of[key], self._key_of[page] = page, key

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; what is known of them stays cached, their ends go first."""
        for page in reversed(sequence.blocks):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        sequence.blocks, sequence.keys, sequence.computed = [], [], 0

    def clear(self) -> None:
        """Forget what is cached: its bytes are gone, or of other weights."""
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def _key(self, before: bytes, tokens: Tokens[int], index: int) -> bytes:
        block = np.array(tokens[index * self.block_len : (index + 1) * self.block_len], np.int64)
        return hashlib.sha256(before + block.tobytes()).digest()
