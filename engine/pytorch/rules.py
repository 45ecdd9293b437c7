"""What a request does to a row of logits before its token is drawn: penalties, biases, bans.

The same edits, in the same order and with the same fp32 roundings, as csrc/kernels/logit_edits.h and
csrc/engine/logit_rules.h make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from turbomill.engine.pytorch.records import Request

# Not infinite, which would mean a broken model. A banned token is chosen when every allowed one is banned;
# one that is not allowed never is.
BANNED, DISALLOWED = -1e30, -3e38


class LogitRules:
    """The rules of one request. `edit` is called for its tokens in order."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self._request = request
        self._allowed = self._bias = self._seen = self._count = None  # [V] each, or nothing to do
        if request.allowed_token_ids:
            self._allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._allowed[request.allowed_token_ids] = True
        if request.logit_bias_ids:
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[request.logit_bias_ids] = torch.tensor(request.logit_biases, device=device)
        if request.repetition_penalty != 1 or request.presence_penalty or request.frequency_penalty:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # in prompt or text
            self._count = torch.zeros(vocab_size, device=device)  # of each token in the text
        self._stops = [token for token in request.stop_token_ids if token < vocab_size]
        self._noted = 0  # tokens that are in `_seen` and `_count`

    @staticmethod
    def wanted_by(request: Request) -> bool:
        """Whether a request has any rule."""
        return bool(
            request.guided
            or request.repetition_penalty != 1
            or request.presence_penalty
            or request.frequency_penalty
            or request.logit_bias_ids
            or (request.min_new_tokens and request.stop_token_ids)
            or request.bad_words
            or request.allowed_token_ids
        )

    def allow(self, mask: bytes, vocab_size: int, device: torch.device) -> None:
        """From now on only these tokens may be chosen: a bit for each, the lowest first."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size]
        self._allowed = torch.from_numpy(bits).to(device, torch.bool)

    def edit(self, logits: Tensor, tokens: Sequence[int], prompt_length: int) -> Tensor:
        """The logits [V], fp32, of the token after `tokens`, edited. What is not finite stays."""
        edited = logits
        if self._seen is not None and self._count is not None:
            self._note(tokens, prompt_length)
            request = self._request
            repetition = torch.tensor(request.repetition_penalty, device=edited.device)
            scaled = torch.where(edited > 0, edited / repetition, edited * repetition)
            edited = torch.where(self._seen, scaled, edited)
            lowered = edited - request.presence_penalty - request.frequency_penalty * self._count
            edited = torch.where(self._count > 0, lowered, edited)
        if self._bias is not None:
            edited = edited + self._bias
        if banned := self._banned(tokens, len(tokens) - prompt_length):
            edited = edited.clone()
            edited[banned] = BANNED
        if self._allowed is not None:
            edited = edited.masked_fill(~self._allowed, DISALLOWED)
        return torch.where(logits.isfinite(), edited, logits)

    def _note(self, tokens: Sequence[int], prompt_length: int) -> None:
        assert self._seen is not None and self._count is not None
        new = torch.tensor(tokens[self._noted :], dtype=torch.int64, device=self._seen.device)
        self._seen[new] = True
        text = new[max(0, prompt_length - self._noted) :]
        self._count.index_add_(0, text, torch.ones_like(text, dtype=self._count.dtype))
        self._noted = len(tokens)

    def _banned(self, tokens: Sequence[int], generated: int) -> list[int]:
        request = self._request
        banned = self._stops if generated < request.min_new_tokens else []
        for word in request.bad_words:
            before = len(word) - 1
            if before <= len(tokens) and list(tokens[len(tokens) - before :]) == word[:-1]:
                banned = [*banned, word[-1]]
        return banned
