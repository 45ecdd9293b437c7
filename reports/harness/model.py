"""Our engine as a model of the harness: its requests become generations that the engine batches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from turbomill import console
from turbomill.engine.config import GenerationConfig
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import UsageError
from turbomill.reports.scores import LogitsError

T = TypeVar("T")
DEFAULT_TOKENS = 256  # of a generation whose task sets no limit; the harness's own default
SEED = 1234  # of the tasks that sample, as the harness's clients of a server have it
# What a task's generation_kwargs may say beside what the harness normalizes.
PASSED_ON = ("top_k", "top_p", "min_p", "repetition_penalty")


class EngineLM(TemplateLM):
    """Scores and generates with an engine, up to `batch` requests at a time.

    Tokens, windows and limits are those of the harness's `local-completions` with `max_length` =
    session_len, so that a server of the same model gives the same numbers. One token of a session is left
    to be generated.
    """

    def __init__(self, engine: TurbomindEngine, name: str, batch: int, add_bos_token: bool = False) -> None:
        super().__init__()
        if engine.tokenizer is None:
            raise UsageError(f"{name}: has no tokenizer, which tasks need; give a model that has one")
        self.tokenizer = engine.tokenizer
        self.max_length = engine.session_len - 1
        self.truncated = 0  # requests whose beginning had no room
        self._engine, self._name, self._batch, self._add_bos = engine, name, batch, add_bos_token

    @property
    def eot_token_id(self) -> int:
        """Ends a text."""
        ids = self._engine.store.eos_token_ids
        return int(self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else ids[0])

    @property
    def prefix_token_id(self) -> int:
        """Precedes a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Names the model in the harness's caches of prompts."""
        return self._engine.store.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text."""
        special = bool(add_special_tokens) or self._add_bos
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Few-shot messages as the model's own text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probability of whole texts, in windows that each see as much as a session holds."""
        pieces: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pieces += [(number, *make_disjoint_window(window)) for window in windows]
        scored = self._run("texts", [(context, rest) for _, context, rest in pieces], self._score)
        totals = [0.0] * len(requests)
        for (number, _, _), (logprob, _) in zip(pieces, scored, strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        async def one(request: tuple[tuple[str, str], list[int], list[int]]) -> tuple[float, bool]:
            texts, context, continuation = request
            answer = await self._score((context, continuation))
            self.cache_hook.add_partial("loglikelihood", texts, answer)
            return answer

        return self._run("answers", requests, one)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first stop string, the end of text or the task's limit."""

        async def one(request: Any) -> str:
            text = await self._generate(*request.args)
            self.cache_hook.add_partial("generate_until", request.args, text)
            return text

        return self._run("texts", requests, one)

    def _run(self, what: str, requests: Sequence[Any], one: Callable[[Any], Awaitable[T]]) -> list[T]:
        """Every request's result, in order; the engine batches those that run together."""

        async def together() -> list[T]:
            limit = asyncio.Semaphore(self._batch)
            with console.progress(f"{what} of {self._name}", len(requests)) as task:

                async def limited(request: Any) -> T:
                    async with limit:
                        result = await one(request)
                    task.advance()
                    return result

                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(limited(request)) for request in requests]
            return [task.result() for task in tasks]

        try:
            return asyncio.run(together())
        except ExceptionGroup as failed:  # the first failure ended the others
            raise failed.exceptions[0] from None

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """The last `room` tokens."""
        if len(ids) > room:
            self.truncated += 1
        return ids[-room:]

    async def _score(self, pair: tuple[list[int], list[int]]) -> tuple[float, bool]:
        """Log probability of a continuation behind a context, and whether greedy decoding would give it."""
        context, continuation = pair
        ids = self._cut([*context, *continuation], self.max_length)
        first = max(len(ids) - len(continuation), 1)
        gen = GenerationConfig(max_new_tokens=1, ignore_eos=True, prompt_logprobs=1)
        logprobs = []
        async with aclosing(self._engine.generate(ids, gen)) as outputs:
            async for output in outputs:
                logprobs += output.prompt_logprobs
        wanted = logprobs[first - 1 :]  # the first is of the second token
        total = sum(token.logprob for token in wanted)
        if not math.isfinite(total):
            text = self.tokenizer.decode(ids[:32])
            raise LogitsError(
                f"{self._name}: the log probabilities of a text that begins with {text!r} hold NaN or inf; "
                "the quantized weights or the KV cache overflow (try a bf16 source, or --quant-policy 0)"
            )
        return total, all(token.logprob == token.top[0][1] for token in wanted)

    async def _generate(self, context: str, wanted: dict[str, Any]) -> str:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(wanted, DEFAULT_TOKENS))
        tokens = min(kwargs["max_gen_toks"], self.max_length - 1)
        temperature = float(kwargs.get("temperature", 0.0))
        gen = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=temperature > 0,
            temperature=temperature,
            stop_words=tuple(stop for stop in kwargs.get("until", []) if stop),
            seed=SEED,
            **{name: kwargs[name] for name in PASSED_ON if kwargs.get(name) is not None},
        )
        ids = self._cut(self.tok_encode(context), self.max_length - tokens)
        text = []
        async with aclosing(self._engine.generate(ids, gen)) as outputs:
            async for output in outputs:
                text.append(output.text)
        return "".join(text)
