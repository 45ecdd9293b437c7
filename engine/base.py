"""The interface of an engine. Every engine passes tests/engine/conformance."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from turbomill.engine.config import GenerationConfig
from turbomill.engine.requests import EngineInfo, EngineMetrics, GenerationOutput, Prompt

if TYPE_CHECKING:
    from turbomill.convert.store import Store


class AsyncEngine(Protocol):
    """Generates for many callers at once, from any number of event loops and threads."""

    @property
    def info(self) -> EngineInfo:
        """Which engine this is, and why it was chosen."""
        ...

    @property
    def session_len(self) -> int:
        """The most tokens, prompt and generated together, of one sequence."""
        ...

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of text, chat messages (through the chat template), or token ids themselves.

        Raises PromptError for a prompt that is empty or that the template or vocabulary refuses.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ...

    def generate(
        self, prompt: Prompt, gen: GenerationConfig | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Check the prompt, and the grammar, now (raises PromptError), run it when iterated.

        Closing the iterator, or cancelling the task that waits for it, cancels the request. Raises
        EngineError when the engine fails.
        """
        ...

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """fp32 logits [T, V] of every position of `token_ids` [T]."""
        ...

    def metrics(self) -> EngineMetrics:
        """A snapshot of the scheduler and the KV pool."""
        ...

    def pause(self) -> None:
        """Plan no more steps; return when none is in flight. Requests are accepted and wait."""
        ...

    def resume(self) -> None:
        """Go on where pause() stopped."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Pause and give memory back: the KV cache's (level 1), and that of weights the store has too (2).

        What runs keeps its text and is computed again after wakeup(). Raises UsageError for another level.
        """
        ...

    def wakeup(self) -> None:
        """Take the memory again and go on. Raises EngineError when it is not there; may be tried again."""
        ...

    def update_params(self, model: str | Path | Store) -> None:
        """Go on with the weights of another store of the same model and quantization.

        What runs keeps its text and goes on with the new weights; nothing that the old ones computed is used
        again. Raises UsageError, with nothing changed, for a store of another form.
        """
        ...

    def close(self) -> None:
        """End every request as cancelled and free everything. Idempotent."""
        ...
