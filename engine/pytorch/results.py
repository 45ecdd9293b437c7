"""What a step's logits mean to its sequences: tokens, ends, logits and log probabilities for the clients."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from turbomill.engine.pytorch.records import Sequence, Slice, StepOutput
from turbomill.engine.pytorch.sampling import draw, logprobs
from turbomill.engine.pytorch.scheduler import Scheduler


class Results:
    """Draws tokens, ends sequences, and collects outputs. Only the engine thread touches it."""

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self._scheduler, self._vocab_size = scheduler, vocab_size
        self._outputs: list[StepOutput] = []
        self.generated_tokens = self.cached_tokens = 0

    def outputs(self) -> list[StepOutput]:
        """What has come since this was last asked for."""
        found, self._outputs = self._outputs, []
        return found

    def take(self, slices: Many[Slice], logits: Many[Tensor]) -> None:
        """A step's logits, fp32, one tensor a slice: [t, V] with `all_rows`, else [1, V]."""
        tokens = self._draw(slices, logits)
        for piece, rows in zip(slices, logits, strict=True):
            self._scheduler.done(piece)
            sequence = piece.sequence
            output = sequence.output()
            if piece.all_rows:
                self._take_rows(piece, rows, output)
            if piece.sample:
                self._take_token(sequence, rows[-1:], tokens[sequence.id], output)
            elif sequence.request.max_new_tokens == 0 and piece.end == sequence.prompt_length:
                self.finish(sequence, "length", output)
            elif output.logits is not None or output.prompt_logprobs:
                self._outputs.append(output)

    def _draw(self, slices: Many[Slice], logits: Many[Tensor]) -> dict[int, int | None]:
        """The next token of each sequence that wants one; None: its logits are not finite."""
        pieces = [piece for piece in slices if piece.sample]
        if not pieces:
            return {}
        last = [rows[-1] for piece, rows in zip(slices, logits, strict=True) if piece.sample]
        for i, piece in enumerate(pieces):
            s = piece.sequence
            if s.rules is not None:
                last[i] = s.rules.edit(last[i], s.tokens, s.prompt_length)
        rows = torch.stack(last)  # [R, V]
        finite = rows.isfinite().all(1).tolist()
        able = [i for i, good in enumerate(finite) if good]
        requests = [pieces[i].sequence.request for i in able]
        drawn = draw(rows[able], requests, [pieces[i].end for i in able]) if able else []
        found = dict(zip(able, drawn, strict=True))
        return {piece.sequence.id: found.get(i) for i, piece in enumerate(pieces)}

    def _take_rows(self, piece: Slice, rows: Tensor, output: StepOutput) -> None:
        # A recomputed prompt repeats positions that were delivered, and may run past the prompt.
        sequence, request = piece.sequence, piece.sequence.request
        begin = max(piece.context, sequence.rows_delivered)
        end = min(piece.end, sequence.prompt_length)
        if end <= begin:
            return
        wanted = rows[begin - piece.context : end - piece.context]
        if request.return_logits:
            output.logits = wanted.cpu().numpy()
        if request.prompt_logprobs >= 0:
            targets = request.token_ids[begin + 1 : end + 1]
            if targets:
                output.prompt_logprobs = logprobs(wanted[: len(targets)], targets, request.prompt_logprobs)
        sequence.rows_delivered = end

    def _take_token(self, sequence: Sequence, row: Tensor, token: int | None, output: StepOutput) -> None:
        request = sequence.request
        if token is None:
            self.fail(sequence, "the model's logits are not finite")
            return
        if token in request.stop_token_ids:
            self.finish(sequence, "stop", output)
            return
        if request.logprobs >= 0:
            output.logprobs = logprobs(row, [token], request.logprobs)
        sequence.tokens.append(token)
        self.generated_tokens += 1
        output.token_ids.append(token)
        if sequence.wants_token:
            self._outputs.append(output)
        else:
            self.finish(sequence, "length", output)

    def finish(self, sequence: Sequence, reason: str, output: StepOutput | None = None) -> None:
        """Its last output; it gives everything back."""
        output = output or sequence.output()
        output.finish_reason = reason
        self.cached_tokens += output.cached_tokens
        self._outputs.append(output)
        self._scheduler.leave(sequence)

    def fail(self, sequence: Sequence, error: str) -> None:
        """The same, with an error."""
        output = sequence.output()
        output.error = " ".join(error.split())
        self.finish(sequence, "error", output)

    def abandon(self, scheduler: Scheduler, sequences: Many[Sequence], error: str) -> None:
        """Go on with another scheduler; the sequences of the one before have failed."""
        self._scheduler = scheduler
        for sequence in sequences:
            output = sequence.output()
            output.error, output.finish_reason = " ".join(error.split()), "error"
            self._outputs.append(output)
