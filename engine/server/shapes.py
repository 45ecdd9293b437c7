"""How the endpoints write a choice: its text, piece by piece or whole, and its log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turbomill.engine.requests import GenerationOutput, TokenLogprob
from turbomill.engine.server.logprobs import chat_logprobs, completion_logprobs

Decode = Callable[[Sequence[int]], str]


class ChoiceWriter:
    """One choice. Outputs are added as they come; what was added since the last call is written."""

    prefix: str  # of the answer's id
    object: str
    chunk_object: str

    def __init__(self, index: int, decode: Decode, scored: bool, echo: tuple[list[int], str] | None) -> None:
        """`scored`: with log probabilities. `echo`: the prompt's tokens and text, which come first."""
        self.index = index
        self._decode, self._scored = decode, scored
        self._unscored_first = echo[0][:1] if echo else []  # nothing precedes it
        self._text = echo[1] if echo else ""
        self._tokens: list[TokenLogprob] = []
        self._finish_reason: str | None = None

    def add(self, output: GenerationOutput) -> None:
        """Take an output in."""
        self._text += output.text
        self._tokens += [*output.prompt_logprobs, *output.logprobs]
        self._finish_reason = output.finish_reason

    @property
    def has_news(self) -> bool:
        """Whether a chunk is worth sending."""
        return bool(self._text or self._finish_reason)

    def opening(self) -> dict[str, Any] | None:
        """The choice of the first chunk, before any text."""

    def piece(self) -> dict[str, Any]:
        """The choice of a chunk."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        raise NotImplementedError

    def _take(self) -> tuple[str, list[TokenLogprob]]:
        text, tokens = self._text, self._tokens
        self._text, self._tokens = "", []
        return text, tokens

    def _token_text(self, token: int) -> str:
        return self._decode([token])


class ChatShape(ChoiceWriter):
    """Choices of /v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        """The role comes first."""
        return {"index": self.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def piece(self) -> dict[str, Any]:
        """A piece of the message."""
        text, logprobs = self._written()
        delta = {"content": text} if text else {}
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }

    def whole(self) -> dict[str, Any]:
        """The message."""
        text, logprobs = self._written()
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }

    def _written(self) -> tuple[str, dict[str, Any] | None]:
        text, tokens = self._take()
        return text, chat_logprobs(self._token_text, tokens) if self._scored else None


class CompletionShape(ChoiceWriter):
    """Choices of /v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    _offset = 0  # of the next token in the text

    def piece(self) -> dict[str, Any]:
        """A piece of the text."""
        text, tokens = self._take()
        logprobs = None
        if self._scored:
            first, self._unscored_first = self._unscored_first, []
            logprobs, self._offset = completion_logprobs(self._token_text, [*first, *tokens], self._offset)
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }

    whole = piece
