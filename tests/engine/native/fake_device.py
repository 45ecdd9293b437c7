"""A device that only remembers which token's keys and values lie where, and a model that reads them.

The next token is a hash of every token of the text, read from the pages: whoever reads a page that holds
anything else gets a wrong text, and usually an assertion before that.
"""

from __future__ import annotations

import zlib
from typing import Any

P = 8  # tokens per page
STOP = 2
VOCAB = 6  # few tokens, so that texts often coincide


def next_token(text: list[int]) -> int:
    return STOP + zlib.crc32(bytes(text)) % (VOCAB - STOP)


def whole_text(prompt: list[int], new: int) -> list[int]:
    """What a request generates: the slow reference."""
    text = list(prompt)
    while len(text) < len(prompt) + new and (token := next_token(text)) != STOP:
        text.append(token)
    return text[len(prompt) :]


class FakeDevice:
    """Pages of tokens; None is garbage. Runs steps as the harness plans them."""

    def __init__(self, pages: int) -> None:
        self.pages: list[list[int | None]] = [[None] * P for _ in range(pages)]
        self.last: dict[int, int] = {}  # per slot
        self.texts: dict[int, list[int]] = {}  # per sequence: the prompt, then every token that was sampled

    def read(self, s: dict[str, Any]) -> list[int | None]:
        """A slice's context, as its block table shows it."""
        return [self.pages[s["blocks"][i // P]][i % P] for i in range(s["context"])]

    def run(self, slices: list[dict[str, Any]], copies: list[tuple[int, int]], broken: set[int]) -> list[int]:
        """A token for each slice. Sequences in `broken` have ended: what they read may be garbage."""
        for source, target in copies:
            self.pages[target] = list(self.pages[source])
        contexts = [self.read(s) for s in slices]
        inputs = [s["tokens"] or [self.last.get(s["slot"])] for s in slices]
        for s, context, tokens in zip(slices, contexts, inputs, strict=True):
            if s["sequence"] not in broken:
                text = self.texts[s["sequence"]]
                assert context == text[: s["context"]], "a context is not what was written"
                assert tokens == text[s["context"] : s["context"] + s["length"]]
            # Keys and values depend on all that precedes them.
            good = context == self.texts[s["sequence"]][: s["context"]]
            self.write(s, tokens if good else [None] * len(tokens))
        samples = []
        for s, context, tokens in zip(slices, contexts, inputs, strict=True):
            assert self.read(s) == context, "a step wrote what another slice of it reads"
            samples.append(self.sample(s, [*context, *tokens]) if s["sample"] else 0)
        return samples

    def fail(self, slices: list[dict[str, Any]], copies: list[tuple[int, int]]) -> list[int]:
        """The step does not run; whatever it was to write is garbage."""
        for _, target in copies:
            self.pages[target] = [None] * P
        for s in slices:
            self.write(s, [None] * s["length"])
        return [0] * len(slices)

    def write(self, s: dict[str, Any], tokens: list[Any]) -> None:
        for i, token in enumerate(tokens, s["context"]):
            self.pages[s["blocks"][i // P]][i % P] = token

    def sample(self, s: dict[str, Any], text: list[Any]) -> int:
        token = STOP if None in text else next_token(text)
        known = self.texts[s["sequence"]]
        if len(known) == len(text):
            known.append(token)
        self.last[s["slot"]] = token
        return token
