"""Which tokens may come next under a grammar, computed on threads of their own while the model runs.

The parser is llguidance (https://github.com/guidance-ai/llguidance): it walks the trie of the vocabulary with
the grammar, and releases Python's lock meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from turbomill.engine.grammar import Grammar
from turbomill.engine.requests import EngineError, PromptError

# Between JSON's tokens. A model that likes white space would otherwise write nothing else.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
MOST_COMPILED = 64  # grammars that are kept
MOST_THREADS = 4


class Guide:
    """One text's way through its grammar. Used by one thread at a time."""

    def __init__(self, name: str, matcher: Any, words: int, ends: Sequence[int], may_end: bool) -> None:
        """`words` of 32 bits make a mask. `ends`: the tokens that end a text; `may_end`: they are chosen."""
        self._name, self._matcher, self._words, self._may_end = name, matcher, words, may_end
        self._ends = np.zeros(4 * words, np.uint8)  # [4 W] a bit for each token
        for token in ends:
            self._ends[token // 8] |= 1 << token % 8
        self.position = 0  # tokens of the text so far

    def mask(self) -> bytes:
        """[4 W] a bit for each token that may come next; empty: none, the text is complete.

        Raises EngineError when the grammar allows nothing here, or is too complex.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: 4 * self._words]
        if self._matcher.is_error():
            raise self._failure()
        others = allowed & ~self._ends
        if not others.any():
            return b""
        return (allowed if self._may_end else others).tobytes()

    def follow(self, token_ids: Sequence[int]) -> bytes:
        """The mask after these tokens. Raises EngineError."""
        for token in token_ids:
            self.position += 1
            if not self._matcher.consume_token(token):
                raise self._failure()
        # A matcher that has failed is stopped too.
        return b"" if self._matcher.is_stopped() and not self._matcher.is_error() else self.mask()

    def _failure(self) -> EngineError:
        reason = one_line(self._matcher.get_error())
        if reason.startswith("NoExtension"):
            reason = f"no token may come after {self.position} tokens"
        return EngineError(f"{self._name} cannot be followed: {reason}")


class Guides:
    """Compiles grammars for a tokenizer and runs their guides. Any thread."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._ll_tokenizer: Any = None  # made when the first grammar comes: it takes a second
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()  # matchers at the beginning; newest last
        self._pool = ThreadPoolExecutor(
            min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="turbomill-guide"
        )

    def start(self, grammar: Grammar, ignore_eos: bool) -> tuple[Guide, bytes]:
        """A guide, and the mask of its first token. With `ignore_eos` it ends only where nothing may follow.

        Raises PromptError for a grammar that is wrong, or that no text fits.
        """
        with self._lock:
            matcher = self._compile(grammar).deep_copy()
        words = -(-self._vocab_size // 32)
        may_end = bool(self._eos_token_ids) and not ignore_eos
        guide = Guide(grammar.name, matcher, words, self._ll_tokenizer.eos_tokens, may_end)
        try:
            return guide, guide.mask()
        except EngineError as error:
            raise PromptError(str(error)) from error

    def run(self, work: Callable[[], None]) -> None:
        """Do it on one of the threads."""
        self._pool.submit(work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        if self._ll_tokenizer is None:
            self._ll_tokenizer = self._wrap_tokenizer()
        limits = LLParserLimits(verbose_errors=False)
        try:
            matcher = LLMatcher(self._ll_tokenizer, _source(grammar), log_level=0, limits=limits)
        except ValueError as error:
            raise PromptError(f"{grammar.name} cannot be followed: {one_line(str(error))}") from error
        if matcher.is_error():
            raise PromptError(f"{grammar.name} cannot be followed: {one_line(matcher.get_error())}")
        self._compiled[grammar] = matcher
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    def _wrap_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            raise PromptError("the model has no tokenizer: response_format cannot be followed")
        try:
            return from_tokenizer(self._tokenizer, self._vocab_size, self._eos_token_ids or None)
        except (ValueError, RuntimeError) as error:
            raise PromptError(
                f"response_format cannot be followed with this model's tokenizer: {one_line(str(error))}"
            ) from error


def _source(grammar: Grammar) -> str:
    """As llguidance reads it. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITE_SPACE})
    return grammar_from(grammar.kind, grammar.text)


def one_line(text: str) -> str:
    """A message without what follows it."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    # A regex's error comes last, after a drawing of the place.
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines or ["unknown reason"])[0]
