"""What an interrupted evaluation has answered: the same one, started again, asks only for the rest."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM

ANSWERS = "answers.jsonl"


def _key(kind: str, arguments: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True).encode()).hexdigest()


class ResumableLM(LM):
    """Stands before a model of the harness and keeps every answer, one line each, in a directory.

    Sampled texts are not kept: asked for several times, they differ.
    """

    def __init__(self, model: LM, directory: Path) -> None:
        super().__init__()
        self.model, self._directory = model, directory
        self._answers = self._read()
        model.set_cache_hook(self)  # type: ignore[arg-type]  # of the hook, add_partial is all that is called

    def _read(self) -> dict[str, Any]:
        file = self._directory / ANSWERS
        answers: dict[str, Any] = {}
        if file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    key, answer = json.loads(line)
                except ValueError:  # the line that was being written
                    continue
                answers[key] = tuple(answer) if isinstance(answer, list) else answer
        return answers

    def add_partial(self, kind: str, arguments: Iterable[Any] | None, answer: Any) -> None:
        """Keep one answer. The model calls it when it has one; of a part of a text without `arguments`."""
        if arguments is None:
            return
        arguments = tuple(arguments)
        if kind == "generate_until" and arguments[1].get("do_sample"):
            return
        key = _key(kind, arguments)
        self._answers[key] = answer
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ANSWERS).open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, answer]) + "\n")

    def _ask(self, kind: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        keys = [_key(kind, request.args) for request in requests]
        missing = [i for i, key in enumerate(keys) if key not in self._answers]
        found = dict(zip(missing, ask([requests[i] for i in missing]), strict=True)) if missing else {}
        return [found[i] if i in found else self._answers[key] for i, key in enumerate(keys)]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """As the model's."""
        return self._ask("loglikelihood", requests, self.model.loglikelihood)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """As the model's."""
        return self._ask("loglikelihood_rolling", requests, self.model.loglikelihood_rolling)

    def generate_until(self, requests: list[Any]) -> list[str]:
        """As the model's."""
        return self._ask("generate_until", requests, self.model.generate_until)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Any:
        """As the model's."""
        return self.model.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """As the model's."""
        return self.model.tokenizer_name

    def finish(self) -> None:
        """The evaluation is whole: the next one asks anew."""
        shutil.rmtree(self._directory, ignore_errors=True)
