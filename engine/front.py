"""The async side of an engine, the same for both: prompts in, text out, control. Below it is a core."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from turbomill.engine.bridge import Bridge
from turbomill.engine.config import GenerationConfig
from turbomill.engine.core import Core
from turbomill.engine.core_requests import core_request, next_arrived, raise_failure, token_logprob
from turbomill.engine.detokenize import TextStream
from turbomill.engine.guide import Guide, Guides
from turbomill.engine.prompts import PromptEncoder
from turbomill.engine.requests import (
    EngineError,
    EngineInfo,
    EngineMetrics,
    FinishReason,
    GenerationOutput,
    Prompt,
    PromptError,
    Usage,
)
from turbomill.errors import UsageError


def session_length(wanted: int | None, context: int) -> int:
    """EngineConfig's `session_len`; None: the whole context. Raises UsageError for a longer one."""
    if wanted is not None and wanted > context:
        raise UsageError(f"session_len is {wanted}, expected at most the model's context of {context} tokens")
    return wanted or context


class EngineFront:
    """What AsyncEngine says, but for `update_params`; see there. An engine attaches its core to it."""

    info: EngineInfo

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        context_length: int,
        session_len: int,
        make_request: Callable[..., Any],
    ) -> None:
        """`make_request` is the core's class of requests."""
        self.vocab_size, self.context_length = vocab_size, context_length
        self._eos_token_ids, self._session_len = eos_token_ids, session_len
        self._make_request = make_request
        self._prompts = PromptEncoder(tokenizer, vocab_size)
        self._guides = Guides(tokenizer, vocab_size, eos_token_ids)
        self._bridge = Bridge(self._guides.run)

    def _attach(self, core: Core) -> None:
        self._engine = core
        self._bridge.attach(core)

    @property
    def session_len(self) -> int:
        """The most tokens, prompt and generated together, of one sequence."""
        return self._session_len

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._prompts.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of text, chat messages, or token ids themselves. Raises PromptError."""
        return self._prompts.encode(prompt)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._prompts.decode(token_ids, skip_special_tokens)

    def generate(
        self, prompt: Prompt, gen: GenerationConfig | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Check the prompt now, run it when iterated; see AsyncEngine."""
        gen = gen or GenerationConfig()
        token_ids = self.encode(prompt)
        room = self._session_len - len(token_ids)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens, but a session holds {self._session_len} and "
                f"at least one must be generated: shorten the prompt or raise --session-len "
                f"(the model's context is {self.context_length})"
            )
        new_tokens = min(gen.max_new_tokens or room, room)
        if gen.n != 1:
            raise PromptError(f"n is {gen.n}, but one generation gives one text: pass each of gen.samples()")
        self._check_ids(gen)
        request = core_request(
            self._make_request,
            token_ids,
            new_tokens,
            gen,
            eos_token_ids=self._eos_token_ids,
            word_tokens=self._prompts.word_tokens,
        )
        start = self._guides.start(gen.grammar, gen.ignore_eos) if gen.grammar else None
        return self._generate(request, gen, start)

    def _check_ids(self, gen: GenerationConfig) -> None:
        biased = [token for token, _ in gen.logit_bias]
        for name, ids in (
            ("logit_bias", biased),
            ("bad_token_ids", gen.bad_token_ids),
            ("allowed_token_ids", gen.allowed_token_ids),
        ):
            if ids and max(ids) >= self.vocab_size:
                raise PromptError(f"{name}: token id {max(ids)}, expected ids below {self.vocab_size}")

    async def _generate(
        self, request: Any, gen: GenerationConfig, start: tuple[Guide, bytes] | None
    ) -> AsyncGenerator[GenerationOutput, None]:
        prompt, scored = request.token_ids, 1
        text = TextStream(
            lambda ids: self.decode(ids, gen.skip_special_tokens), gen.stop_words, gen.min_new_tokens
        )
        with self._bridge.submit(request, start) as stream:
            finish: FinishReason | None = None
            while finish is None:
                arrived = await next_arrived(stream)
                finish = arrived.finish
                before = text.tokens
                piece = text.feed(arrived.token_ids, final=finish is not None)
                if text.stopped:
                    finish = "stop"
                rows = arrived.prompt_logprobs
                of_prompt = [token_logprob(t, r) for t, r in zip(prompt[scored:], rows, strict=False)]
                scored += len(rows)
                usage = Usage(len(prompt), text.tokens, arrived.cached_tokens)
                count = text.tokens - before  # tokens behind a stop string, which had been sampled, go
                yield GenerationOutput(
                    piece,
                    tuple(arrived.token_ids[:count]),
                    usage,
                    finish,
                    tuple(arrived.logprobs[:count]),
                    tuple(of_prompt),
                )

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """fp32 logits [T, V] of every position of `token_ids` [T]."""
        ids = self.encode(list(token_ids))
        if len(ids) > self._session_len:
            raise PromptError(
                f"{len(ids)} tokens to score, but a session holds {self._session_len}: raise --session-len"
            )
        request = self._make_request(token_ids=ids, max_new_tokens=0, return_logits=True)
        out: NDArray[np.float32] | None = None  # [T, V]
        filled = 0
        with self._bridge.submit(request) as stream:
            finished = False
            while not finished:
                for output in await stream.next():
                    finished = finished or bool(output.finish_reason)
                    raise_failure(output)
                    if output.logits is not None:
                        if out is None:
                            out = np.empty((len(ids), output.logits.shape[1]), np.float32)
                        out[filled : filled + len(output.logits)] = output.logits
                        filled += len(output.logits)
        if out is None or filled != len(ids):
            raise EngineError(
                f"the engine returned logits of {filled} of {len(ids)} positions (request cancelled)"
            )
        return out

    def metrics(self) -> EngineMetrics:
        """A snapshot of the scheduler and the KV pool."""
        now = self._engine.metrics()
        return EngineMetrics(**{field.name: getattr(now, field.name) for field in fields(EngineMetrics)})

    def pause(self) -> None:
        """Plan no more steps; return when none is in flight. Requests are accepted and wait."""
        self._bridge.control("pause")

    def resume(self) -> None:
        """Go on where pause() stopped."""
        self._bridge.control("resume")

    def sleep(self, level: int = 1) -> None:
        """Pause and give memory back; see AsyncEngine."""
        if level not in (1, 2):
            raise UsageError(f"the level of sleep is {level!r}, expected 1 (KV cache) or 2 (weights too)")
        self._bridge.control("sleep", level)

    def wakeup(self) -> None:
        """Take the memory again and go on; see AsyncEngine."""
        self._bridge.control("wake")

    def close(self) -> None:
        """End every request as cancelled and free everything. Idempotent."""
        self._bridge.close()
        self._guides.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
