"""A conversation in the terminal, or through a pipe."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing

from turbomill.engine.base import AsyncEngine
from turbomill.engine.config import GenerationConfig
from turbomill.engine.requests import Messages, PromptError

logger = logging.getLogger("turbomill.engine")


class Conversation:
    """The history of a chat. It forgets its oldest exchanges when the session has no room for an answer."""

    def __init__(self, engine: AsyncEngine, gen: GenerationConfig, system_prompt: str | None = None) -> None:
        self._engine, self._gen = engine, gen
        self._system: Messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._history: Messages = []

    def say(self, text: str, write: Callable[[str], object]) -> str:
        """Answer one message, writing the pieces as they come. An interrupted answer stays in the history."""
        self._history.append({"role": "user", "content": text})
        pieces: list[str] = []

        async def run() -> None:
            async with aclosing(self._engine.generate(self._prompt(), self._gen)) as outputs:
                async for output in outputs:
                    pieces.append(output.text)
                    write(output.text)

        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            write(" [stopped]")
        except BaseException:
            self._history.pop()
            raise
        answer = "".join(pieces)
        self._history.append({"role": "assistant", "content": answer})
        return answer

    def _prompt(self) -> list[int]:
        # Half of the session, or all that an answer may have, stays free for the answer.
        reserve = min(self._gen.max_new_tokens or self._engine.session_len, self._engine.session_len // 2)
        while True:
            token_ids = self._engine.encode(self._system + self._history)
            if len(token_ids) + reserve <= self._engine.session_len or len(self._history) < 3:
                return token_ids
            logger.warning("the session is full: forgetting the oldest question and its answer")
            del self._history[:2]


def _lines() -> Iterator[str]:
    """What the user says, until `exit` or the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() editing and history
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if not line and not interactive:
            return
        if line.strip() == "exit":
            return
        if line.strip():
            yield line.strip()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def talk(conversation: Conversation) -> None:
    """Answer line after line from stdin on stdout."""
    for line in _lines():
        try:
            conversation.say(line, _write)
        except PromptError as error:
            if not sys.stdin.isatty():
                raise
            _write(f"error: {error}")
        _write("\n")
