"""Generated tasks that a damaged KV cache fails: passkey retrieval and exact copying, at any length.

Both are answered by greedy decoding, whose outcome one pass over prompt and answer tells: it gives the answer
if and only if every token of the answer is the likeliest at its place.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

DEPTHS = (0.1, 0.5, 0.9)

# The text of the passkey task of Mohtashami and Jaggi (arXiv 2305.16300).
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTION = "\nWhat is the pass key? The pass key is"
COPY = "\nThe same lines again, exactly:\n"
VERBS = ("load", "merge", "split", "check", "send", "index", "parse", "flush")
NOUNS = ("cart", "user", "token", "batch", "edge", "order", "frame", "page")


class Scorer(Protocol):
    """The part of an engine that probes use."""

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """fp32 logits [T, V]."""
        ...


@dataclass(frozen=True)
class Probe:
    """A prompt with its answers: each a span of `ids` that greedy decoding must give."""

    ids: list[int]
    answers: tuple[slice, ...]

    def score(self, logits: NDArray[np.float32]) -> float:
        """The share of answers that logits [T, V] of `ids` give."""
        said = logits.argmax(axis=1)
        right = [self.ids[a] == said[a.start - 1 : a.stop - 1].tolist() for a in self.answers]
        return sum(right) / len(right)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def passkey(tokenizer: Any, length: int, depth: float, seed: int) -> Probe | None:
    """A five-digit number hidden at `depth` (0 to 1) of `length` tokens; None where it has no room."""
    key = random.Random(seed).randrange(10_000, 100_000)
    task, question = _encode(tokenizer, TASK), _encode(tokenizer, QUESTION)
    hidden = _encode(tokenizer, f"The pass key is {key}. Remember it. {key} is the pass key. ")
    answer, filler = _encode(tokenizer, f" {key}"), _encode(tokenizer, FILLER)
    room = length - len(task) - len(hidden) - len(question) - len(answer)
    if room < 2:
        return None
    before = round(depth * room)
    endless = filler * (room // len(filler) + 2)
    prompt = [*task, *endless[:before], *hidden, *endless[: room - before], *question]
    return Probe([*prompt, *answer], (slice(length - len(answer), length),))


def copying(tokenizer: Any, length: int, seed: int) -> Probe | None:
    """Lines of made-up code, twice, in at most `length` tokens; each line is an answer.

    The first line, which may begin otherwise, is not asked for, and a line counts from its third token on.
    None where not two lines have room.
    """
    rng = random.Random(seed)
    between = _encode(tokenizer, COPY)
    lines: list[list[int]] = []
    while True:
        line = _encode(tokenizer, _line(rng))
        if 2 * sum(map(len, [*lines, line])) + len(between) > length:
            break
        lines.append(line)
    if len(lines) < 2:
        return None
    block = [token for line in lines for token in line]
    ids = [*block, *between, *block]
    start = len(block) + len(between)
    answers = []
    for line in lines:
        answers.append(slice(start + min(2, len(line) - 1), start + len(line)))
        start += len(line)
    return Probe(ids, tuple(answers[1:]))


def _line(rng: random.Random) -> str:
    name = "".join(rng.choices("abcdefghkmnpqrstuvwxyzABCDEFGHKLMN23456789", k=5))
    return f"{rng.choice(NOUNS)}_{rng.randrange(1000)} = {rng.choice(VERBS)}_{rng.choice(NOUNS)}('{name}')\n"


@dataclass(frozen=True)
class ProbeScores:
    """Accuracies at one length; None where a task has no room."""

    passkey: float | None
    copy: float | None


def run_probes(engine: Scorer, tokenizer: Any, length: int, items: int) -> ProbeScores:
    """Both tasks at `length` tokens: `items` numbers at each of DEPTHS, `items` texts to copy."""
    keys = [passkey(tokenizer, length, depth, 97 * i + length) for i in range(items) for depth in DEPTHS]
    texts = [copying(tokenizer, length, 31 * i + length) for i in range(items)]
    return ProbeScores(_mean(engine, keys), _mean(engine, texts))


def _mean(engine: Scorer, probes: Sequence[Probe | None]) -> float | None:
    scores = [p.score(asyncio.run(engine.logits(p.ids))) for p in probes if p is not None]
    return sum(scores) / len(scores) if scores else None
