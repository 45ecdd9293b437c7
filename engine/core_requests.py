"""What goes into an engine's core for one generation, and what comes back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turbomill.engine.bridge import OutputStream
from turbomill.engine.config import GenerationConfig
from turbomill.engine.core import Logprobs, Output
from turbomill.engine.requests import EngineError, FinishReason, PromptError, TokenLogprob


def core_request(
    make: Callable[..., Any],
    token_ids: list[int],
    max_new_tokens: int,
    gen: GenerationConfig,
    *,
    eos_token_ids: Sequence[int],
    word_tokens: Callable[[str], list[list[int]]],
) -> Any:
    """What the core takes; `make` is its class. `word_tokens` gives the token sequences that spell a word."""
    stop_ids = set(gen.stop_token_ids)
    if not gen.ignore_eos:
        stop_ids.update(eos_token_ids)
    bad_words = [[token] for token in gen.bad_token_ids]
    for word in gen.bad_words:
        spelled = word_tokens(word)
        if not spelled:
            raise PromptError(f"bad_words: the tokenizer has no tokens for {word!r}")
        bad_words += spelled
    return make(
        token_ids=token_ids,
        max_new_tokens=max_new_tokens,
        temperature=0.0 if gen.greedy else float(gen.temperature),
        top_k=gen.top_k,
        top_p=float(gen.top_p),
        min_p=float(gen.min_p),
        seed=secrets.randbits(63) if gen.seed is None else gen.seed % 2**63,
        logprobs=-1 if gen.logprobs is None else gen.logprobs,
        prompt_logprobs=-1 if gen.prompt_logprobs is None else gen.prompt_logprobs,
        stop_token_ids=sorted(stop_ids),
        priority=gen.priority,
        repetition_penalty=float(gen.repetition_penalty),
        presence_penalty=float(gen.presence_penalty),
        frequency_penalty=float(gen.frequency_penalty),
        logit_bias_ids=[token for token, _ in gen.logit_bias],
        logit_biases=[float(bias) for _, bias in gen.logit_bias],
        min_new_tokens=gen.min_new_tokens,
        bad_words=bad_words,
        allowed_token_ids=list(gen.allowed_token_ids),
        guided=gen.grammar is not None,
    )


@dataclass
class Arrived:
    """What several outputs of a request hold together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None


def raise_failure(output: Output) -> None:
    """Raise EngineError when the request has failed."""
    if output.finish_reason == "error":
        raise EngineError(output.error or "the engine failed this request")


async def next_arrived(stream: OutputStream) -> Arrived:
    """Wait for outputs; all that are there. Raises EngineError."""
    arrived = Arrived()
    for output in await stream.next():
        raise_failure(output)
        arrived.token_ids.extend(output.token_ids)
        if output.logprobs:
            arrived.logprobs += [
                token_logprob(token, logprobs)
                for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
            ]
        arrived.prompt_logprobs += output.prompt_logprobs
        arrived.cached_tokens = output.cached_tokens
        if output.finish_reason:
            arrived.finish = output.finish_reason  # type: ignore[assignment]
    return arrived


def token_logprob(token: int, logprobs: Logprobs) -> TokenLogprob:
    """With its token."""
    return TokenLogprob(token, logprobs.logprob, tuple(logprobs.top))
