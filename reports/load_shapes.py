"""What generated loads look like: lengths around a mean, a prefix that all share, several turns."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from turbomill.errors import UsageError

Distribution = Literal["uniform", "lognormal"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load. Of a conversation's later turns, `prompt` is what is new."""

    prompt: str | list[int]
    prompt_tokens: int
    output_len: int


@dataclass(frozen=True)
class Shape:
    """Of generated prompts and answers."""

    range_ratio: float = 0.0  # uniform: lengths within this share of the mean; lognormal: their deviation
    distribution: Distribution = "uniform"
    prefix_len: int = 0  # tokens with which every conversation begins
    turns: int = 1  # of each conversation; each repeats what was said before

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise UsageError(
                f"--length-distribution {self.distribution}: expected {' or '.join(DISTRIBUTIONS)}"
            )
        most = 1.0 if self.distribution == "uniform" else 10.0
        if not 0 <= self.range_ratio <= most:
            raise UsageError(f"--random-range-ratio {self.range_ratio}: expected 0 to {most:g}")
        for option, value, low in (("random-prefix-len", self.prefix_len, 0), ("num-turns", self.turns, 1)):
            if value < low:
                raise UsageError(f"--{option} {value}: expected at least {low}")

    def lengths(self, mean: int, count: int, rng: random.Random) -> list[int]:
        """`count` lengths of at least 1 whose mean is `mean`.

        Uniform over [mean (1 - ratio), mean (1 + ratio)], as `vllm bench serve --random-range-ratio`; or
        lognormal with a standard deviation of ratio * mean, which has the long tail of real traffic.
        """
        if self.range_ratio == 0:
            return [mean] * count
        if self.distribution == "uniform":
            low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
            return [max(rng.randint(low, high), 1) for _ in range(count)]
        sigma = math.sqrt(math.log1p(self.range_ratio**2))
        mu = math.log(mean) - sigma**2 / 2
        return [max(round(rng.lognormvariate(mu, sigma)), 1) for _ in range(count)]

    def conversations(
        self, count: int, input_len: int, output_len: int, vocab_size: int, seed: int
    ) -> list[list[LoadRequest]]:
        """`count` conversations of random tokens: [count][turns]."""
        rng = random.Random(seed)
        prefix = [rng.randrange(vocab_size) for _ in range(self.prefix_len)]
        inputs = self.lengths(input_len, count * self.turns, random.Random(seed + 2))
        outputs = self.lengths(output_len, count * self.turns, random.Random(seed + 3))
        found = []
        for number in range(count):
            talk = []
            for turn in range(self.turns):
                at = number * self.turns + turn
                said = [rng.randrange(vocab_size) for _ in range(inputs[at])]
                prompt = [*prefix, *said] if turn == 0 else said
                talk.append(LoadRequest(prompt, len(prompt), outputs[at]))
            found.append(talk)
        return found


def longest(conversations: Sequence[Sequence[LoadRequest]]) -> int:
    """Tokens of the longest conversation, answers included."""
    return max(sum(turn.prompt_tokens + turn.output_len for turn in talk) for talk in conversations)
