"""Prompts to token ids: text, chat messages, or token ids themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from turbomill.engine.requests import Messages, Prompt, PromptError


class PromptEncoder:
    """A tokenizer with its chat template, usable from many threads. Without one, only token ids run."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        # A fast tokenizer may change its own settings while it encodes, and then refuses a second borrower.
        self._lock = threading.Lock()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids [T], T >= 1. Raises PromptError."""
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, add_special_tokens=True)
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            # The template writes the special tokens itself.
            ids = self._tokenize(self._render(prompt), add_special_tokens=False)  # type: ignore[arg-type]
        else:
            ids = self._check_ids(prompt)  # type: ignore[arg-type]
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, exactly: no clean-up of spaces. Empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def word_tokens(self, word: str) -> list[list[int]]:
        """The token sequences of a word at the beginning of a text and after a space."""
        spelled = [self._tokenize(text, add_special_tokens=False) for text in (word, f" {word}")]
        return [ids for i, ids in enumerate(spelled) if ids and ids not in spelled[:i]]

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("the model has no tokenizer: send token ids")
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _render(self, messages: Messages) -> str:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise PromptError("the model has no chat template: send text instead of messages")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise PromptError(f"a chat message is {message!r}, expected {{'role': ..., 'content': ...}}")
        try:
            with self._lock:
                return self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
        except Exception as error:  # templates raise what they like
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise PromptError(f"the model's chat template refuses these messages: {reason}") from error

    def _check_ids(self, token_ids: Sequence[int]) -> list[int]:
        ids = list(token_ids)
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise PromptError(
                    f"token id {token!r} in the prompt, expected integers below {self._vocab_size}"
                )
        return ids
