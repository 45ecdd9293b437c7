"""Loads from recorded conversations in ShareGPT's format, chosen as `vllm bench serve` chooses them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turbomill.errors import TurbomillError
from turbomill.reports.load_shapes import LoadRequest

# vLLM's limits on what it takes from the file.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


def read_sharegpt(
    path: Path,
    count_tokens: Callable[[str], int],
    num_prompts: int,
    output_len: int | None = None,
    limit: int = LONGEST,
    seed: int = 0,
) -> list[LoadRequest]:
    """The first question and the length of its answer of `num_prompts` conversations, drawn in random order.

    As vLLM does, conversations of fewer than two messages, prompts or answers under 4 tokens, prompts above
    1024 and sums above 2048 (or `limit`) are left out; `output_len` replaces the answers' lengths. Raises
    TurbomillError.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TurbomillError(f"--dataset-path {path}: not readable as JSON ({error})") from None
    if not isinstance(rows, list):
        raise TurbomillError(f"--dataset-path {path}: expected a list of conversations, as ShareGPT's")
    talks = [texts for row in rows if (texts := _texts(row)) is not None]
    random.Random(seed).shuffle(talks)
    found: list[LoadRequest] = []
    for prompt, answer in talks:
        if len(found) == num_prompts:
            break
        asked, given = count_tokens(prompt), output_len or count_tokens(answer)
        short = asked < SHORTEST or (output_len is None and given < SHORTEST)
        if not short and asked <= LONGEST_PROMPT and asked + given <= min(limit, LONGEST):
            found.append(LoadRequest(prompt, asked, given))
    if not found:
        raise TurbomillError(
            f"--dataset-path {path}: none of {len(rows)} conversations can be used; expected "
            '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}'
        )
    return found


def _texts(row: Any) -> tuple[str, str] | None:
    """The first two messages; None for what is no conversation of two."""
    talk = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(talk, list) or len(talk) < 2:
        return None
    first, second = (message.get("value") if isinstance(message, dict) else None for message in talk[:2])
    if isinstance(first, str) and first and isinstance(second, str) and second:
        return first, second
    return None
