"""The requests this server understands, checked at the edge. What it cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from turbomill.engine.config import MAX_LOGPROBS, MAX_SAMPLES, GenerationConfig
from turbomill.engine.grammar import (
    Grammar,
    choice_grammar,
    lark_grammar,
    parse_response_format,
    regex_grammar,
    schema_grammar,
    structured_outputs,
)
from turbomill.engine.server.errors import ApiError
from turbomill.errors import UsageError

# Accepted values of parameters that are not implemented: what means "off", or has no effect on the result.
OFF: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
}
GRAMMARS: dict[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": lambda value, _: parse_response_format(value),
    "guided_json": schema_grammar,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": lark_grammar,
    "structured_outputs": structured_outputs,
}
# These describe the client, not the text.
NO_EFFECT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool = False


class TextRequest(BaseModel):
    """What chat and text completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: off
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # OpenAI's penalties and bias, and vLLM's names for what OpenAI does not have.
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    min_p: float = Field(0.0, ge=0, le=1)
    logit_bias: dict[str, float] | None = None
    min_tokens: int = Field(0, ge=0)
    bad_words: list[str] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    # What the text must be: OpenAI's and LMDeploy's field, and vLLM's.
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def check_supported(self) -> None:
        """Raise ApiError (400) naming the first parameter that this server does not implement."""
        for name, value in (self.model_extra or {}).items():
            if name in NO_EFFECT:
                continue
            if name not in OFF:
                raise ApiError(400, f"{name}: unknown parameter", name, "unknown_parameter")
            if value not in OFF[name]:
                raise ApiError(
                    400, f"{name}: not supported by this server; leave it out", name, "unsupported_parameter"
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only allowed with stream=true", "stream_options")

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: what is left of the session."""
        return self.max_tokens

    @property
    def top_count(self) -> int | None:
        """How many likeliest tokens are reported beside each token; None: no log probabilities at all."""
        return None

    @property
    def wants_echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def _grammar(self) -> Grammar | None:
        given = {name: value for name in GRAMMARS if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            raise ApiError(400, f"{' and '.join(given)}: give one of them", list(given)[1])
        for name, value in given.items():
            try:
                return GRAMMARS[name](value, name)
            except UsageError as error:
                raise ApiError(400, str(error), name) from error
        return None

    def _bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise ApiError(400, "logit_bias: keys must be token ids", "logit_bias") from None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def generation_config(self) -> GenerationConfig:
        """The same in the engine's words. Raises UsageError."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationConfig(
            max_new_tokens=self.token_limit,
            do_sample=self.temperature > 0,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=self.seed,
            stop_words=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            n=self.n,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self._bias().items()),
            min_new_tokens=self.min_tokens,
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=self.top_count,
            prompt_logprobs=self.top_count if self.wants_echo else None,
            priority=self.priority,
            response_format=self._grammar(),
        )


class TextPart(BaseModel):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_template_input(self) -> dict[str, str]:
        """What chat templates expect: "developer" is the newer name of "system"."""
        text = (
            self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(TextRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def check_supported(self) -> None:
        """Likewise."""
        super().check_supported()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only allowed with logprobs=true", "top_logprobs")

    @property
    def top_count(self) -> int | None:
        """`top_logprobs` counts only when `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is the newer name of `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(TextRequest):
    """POST /v1/completions."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's default here
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @property
    def top_count(self) -> int | None:
        """Here `logprobs` is the number itself."""
        return self.logprobs

    @property
    def wants_echo(self) -> bool:
        """`echo`."""
        return self.echo

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts: always a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt: empty list", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]
