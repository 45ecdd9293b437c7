"""Log probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turbomill.engine.requests import TokenLogprob

Decode = Callable[[int], str]  # a token's own text
REPLACEMENT = "\ufffd"


def _entry(decode: Decode, token: int, logprob: float) -> dict[str, Any]:
    text = decode(token)
    # A token that ends within a character has no text of its own, and thus no bytes that we know.
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if REPLACEMENT in text else list(text.encode()),
    }


def chat_logprobs(decode: Decode, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""
    content = [
        {
            **_entry(decode, t.token_id, t.logprob),
            "top_logprobs": [_entry(decode, token, logprob) for token, logprob in t.top],
        }
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    decode: Decode, tokens: Sequence[TokenLogprob | int], offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a choice of /v1/completions, and the offset after its tokens.

    A bare token id is a prompt's first, which nothing precedes: its values are null. `offset`: of the first
    token in the choice's text.
    """
    texts, values, tops, offsets = [], [], [], []
    for t in tokens:
        token = t if isinstance(t, int) else t.token_id
        texts.append(decode(token))
        offsets.append(offset)
        offset += len(texts[-1])
        if isinstance(t, int):
            values.append(None)
            tops.append(None)
            continue
        values.append(t.logprob)
        top = {decode(other): logprob for other, logprob in reversed(t.top)}  # equal texts: the likeliest
        tops.append({texts[-1]: t.logprob} | top)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset
