"""What goes into the engine and what comes out, and the errors in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from turbomill.errors import TurbomillError, UsageError

FinishReason = Literal["stop", "length", "cancelled"]

# Chat messages: {"role": "user", "content": "..."}.
Messages = list[dict[str, Any]]
# Text is tokenized as it is; messages go through the chat template; token ids are taken as they are.
Prompt = str | list[int] | Messages


class PromptError(UsageError):
    """A prompt that cannot be run: empty, too long, or not what the model's vocabulary or template allows."""


class EngineError(TurbomillError):
    """The engine failed, or is closed."""


@dataclass(frozen=True)
class Usage:
    """Tokens so far."""

    prompt_tokens: int
    generated_tokens: int  # without the stop token
    cached_tokens: int = 0  # of the prompt, that the prefix cache had


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability in the model's own distribution, whatever temperature and penalties."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens in its place, likeliest first


@dataclass(frozen=True)
class GenerationOutput:
    """The next piece of a generation. Pieces concatenate to the whole; the last has a `finish_reason`.

    `text` may lag behind `token_ids`: a token can end within a character or within a possible stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, where the request wants them
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the next prompt tokens from the second on, likewise


@dataclass(frozen=True)
class EngineInfo:
    """Which engine was chosen, what it runs on, why, and how it stores keys and values."""

    name: str
    backend: str
    reason: str
    kv_cache: str = ""


@dataclass(frozen=True)
class EngineMetrics:
    """A snapshot of the scheduler and the KV pool."""

    waiting: int
    running: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int  # held for prompts that begin alike, given up when a running sequence needs them
    steps: int
    prompt_tokens: int
    cached_tokens: int  # of those, the ones that were not computed
    generated_tokens: int
    preemptions: int
    evictions: int
    steps_in_flight: int
    stalled_seconds: float  # since the step in flight gave no sign; a busy engine stays below a step's length
    paused: bool
    healthy: bool
