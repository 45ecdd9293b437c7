"""What is below an engine's async side: a core that runs requests and calls back with what they gave.

`turbomill._core.Engine` is one, `turbomill.engine.pytorch.core.TorchCore` another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Logprobs(Protocol):
    """log softmax of the model's own logits, whatever the temperature and the rules."""

    @property
    def logprob(self) -> float:
        """Of the token itself."""
        ...

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens, likeliest first."""
        ...


class Output(Protocol):
    """What one step gave one request. The last of a request has a `finish_reason`."""

    @property
    def id(self) -> int: ...

    @property
    def token_ids(self) -> list[int]:
        """New tokens, without the stop token."""
        ...

    @property
    def finish_reason(self) -> str:
        """Empty while it runs, then "stop", "length", "cancelled" or "error"."""
        ...

    @property
    def error(self) -> str:
        """Why it failed."""
        ...

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """[t, V] of the next t prompt positions, where wanted."""
        ...

    @property
    def logprobs(self) -> Sequence[Logprobs]:
        """One for each of token_ids, where wanted."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[Logprobs]:
        """Of the next prompt tokens from the second on, where wanted."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        ...


class Core(Protocol):
    """Runs requests; calls back, on a thread of its own, with the outputs of each step."""

    def submit(self, request: Any) -> int:
        """Queue a request; its id. Raises ValueError for one that can never run, RuntimeError when closed."""
        ...

    def cancel(self, request_id: int) -> None:
        """Ask for a request to end; its last output has finish_reason "cancelled"."""
        ...

    def allow(self, request_id: int, position: int, mask: bytes) -> None:
        """Say which tokens may follow the `position` generated ones of a guided request."""
        ...

    def metrics(self) -> Any:
        """The fields of EngineMetrics."""
        ...

    def close(self) -> None:
        """End every request as cancelled. Idempotent."""
        ...
