"""What goes through the core: a request, the engine's own state of it, and what a step gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbomill.engine.pytorch.rules import LogitRules


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation, checked. Fields as in turbomill._core.Request, where they are explained."""

    token_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    stop_token_ids: list[int] = field(default_factory=list)
    return_logits: bool = False
    priority: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias_ids: list[int] = field(default_factory=list)
    logit_biases: list[float] = field(default_factory=list)
    min_new_tokens: int = 0
    bad_words: list[list[int]] = field(default_factory=list)
    allowed_token_ids: list[int] = field(default_factory=list)
    guided: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """log softmax of the model's own logits: of the token, and of the likeliest ones."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class StepOutput:
    """What one step gave one request; see turbomill.engine.core.Output."""

    id: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    logits: NDArray[np.float32] | None = None  # [t, V]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0


class Sequence:
    """A request while the engine works on it. Only the engine thread touches it."""

    def __init__(self, number: int, request: Request, rules: LogitRules | None) -> None:
        self.id, self.request, self.rules = number, request, rules
        self.tokens = list(request.token_ids)  # the prompt, then what was generated
        self.computed = 0  # tokens whose keys and values are in the cache
        self.blocks: list[int] = []  # pages of the cache that hold them
        self.keys: list[bytes] = []  # of the blocks that are recorded in the prefix cache
        self.cached_tokens = -1  # prompt tokens found in the cache when it first ran; -1: not yet
        self.rows_delivered = 0  # prompt positions whose logits, or logprobs, the client has
        self.allowed_at = -1  # guided: the rules know what may follow so many generated tokens
        self.state: Any = None  # the model's own cache of this sequence, where it is not paged
        self.finished = False

    @property
    def urgency(self) -> tuple[int, int]:
        """Who is served first: the lower `priority`, then who came first."""
        return self.request.priority, self.id

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.token_ids)

    @property
    def generated(self) -> int:
        """Tokens that were generated."""
        return len(self.tokens) - self.prompt_length

    @property
    def wants_token(self) -> bool:
        """Whether another token is wanted; a request for logits alone wants none."""
        return self.generated < self.request.max_new_tokens

    @property
    def ready(self) -> bool:
        """Whether the next token may be drawn: a guided one's mask has come."""
        return not self.request.guided or self.allowed_at == self.generated

    @property
    def owes_rows(self) -> bool:
        """Whether logits, or logprobs, of the prompt are still owed to the client."""
        wanted = self.request.return_logits or self.request.prompt_logprobs >= 0
        return wanted and self.rows_delivered < self.prompt_length

    @property
    def runnable(self) -> int:
        """Tokens to run next: the rest of what is not computed, while something is wanted from it."""
        if not self.ready or not (self.computed < self.prompt_length or self.wants_token):
            return 0
        return len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """The most tokens that it need not run itself: the last one gives the next token's logits."""
        most = len(self.tokens) - 1
        return min(most, self.rows_delivered) if self.owes_rows else most

    def output(self) -> StepOutput:
        """An output to fill."""
        return StepOutput(self.id, cached_tokens=max(0, self.cached_tokens))


@dataclass(frozen=True)
class Slice:
    """The consecutive tokens of one sequence that a step computes."""

    sequence: Sequence
    context: int  # tokens before them, already in the cache
    tokens: list[int]
    sample: bool  # the last one's logits give the next token
    all_rows: bool  # logits, or logprobs, of every one are wanted

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.context + len(self.tokens)
