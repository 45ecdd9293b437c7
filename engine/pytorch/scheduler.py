"""Which tokens the next step computes. The policy of csrc/engine/scheduler.h, one step at a time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from turbomill.engine.pytorch.blocks import BlockPool
from turbomill.engine.pytorch.records import Sequence, Slice


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.urgency


class Scheduler:
    """Running sequences hold blocks; waiting ones hold none. Both are in the order of their urgency."""

    def __init__(self, pool: BlockPool, max_batch_size: int, max_prefill_token_num: int) -> None:
        self.pool, self._max_batch, self._max_prefill = pool, max_batch_size, max_prefill_token_num
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Let it wait for its turn."""
        self._by_id[sequence.id] = sequence
        insort(self.waiting, sequence, key=_urgency)

    def find(self, number: int) -> Sequence | None:
        """A sequence that has not left."""
        return self._by_id.get(number)

    def all(self) -> list[Sequence]:
        """Every sequence."""
        return list(self._by_id.values())

    def plan(self) -> list[Slice]:
        """The next step; empty when nothing can run. Running sequences go first, then new prompts.

        Prompt tokens share the budget `max_prefill_token_num`; a decode's single token is outside it, so
        prompts never starve decodes.
        """
        slices: list[Slice] = []
        budget = self._max_prefill
        index, short = 0, False
        while index < len(self.running) and not short:
            sequence = self.running[index]
            length = sequence.runnable
            if length > 1:
                length = min(length, budget)
                budget -= length
            if length and self._make_room(sequence, sequence.computed + length):
                slices.append(self._slice(sequence, length))
            elif length:
                self._preempt(sequence)  # nobody less urgent is left to give way
                short = True
            index += 1
        if not short:
            slices += self._admit(budget)
        return slices

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Give a running sequence the blocks for so many tokens; those behind it give way, the last first."""
        needed = self.pool.needed(tokens) - len(sequence.blocks)
        while needed > self.pool.available and self.running[-1] is not sequence:
            self._preempt(self.running[-1])
        if needed > self.pool.available:
            return False
        self.pool.extend(sequence, needed)
        return True

    def _admit(self, budget: int) -> Iterable[Slice]:
        """New prompts in turn, while the whole prompt fits and every running sequence keeps a spare block."""
        slices: list[Slice] = []
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_batch:
                break
            if not sequence.ready:  # a guided one that was preempted
                continue
            shared = self.pool.match(sequence)
            whole = self.pool.needed(len(sequence.tokens) + sequence.wants_token)
            new = whole - len(shared) + self.pool.idle(shared)
            if new > self.pool.available - len(self.running):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_urgency)
            self.pool.share(sequence, shared)
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = sequence.computed
            length = min(sequence.runnable, budget)
            budget -= length
            self.pool.extend(sequence, self.pool.needed(sequence.computed + length) - len(shared))
            slices.append(self._slice(sequence, length))
        return slices

    @staticmethod
    def _slice(sequence: Sequence, length: int) -> Slice:
        context, end = sequence.computed, sequence.computed + length
        return Slice(
            sequence,
            context,
            sequence.tokens[context:end],
            sample=end == len(sequence.tokens) and sequence.wants_token,
            all_rows=sequence.owes_rows and context < sequence.prompt_length,
        )

    def done(self, piece: Slice) -> None:
        """A slice has been computed: others may share its blocks."""
        piece.sequence.computed = piece.end
        self.pool.record(piece.sequence)

    def leave(self, sequence: Sequence) -> None:
        """A finished sequence gives everything back."""
        del self._by_id[sequence.id]
        self._give_back(sequence)

    def drop_blocks(self) -> None:
        """Everyone waits again, with nothing computed, and nothing is cached."""
        while self.running:
            self._preempt(self.running[-1])
        self.pool.clear()

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence)
        sequence.state = None
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Its blocks stay cached until they are needed; it waits at its old place, and computes the rest."""
        self._give_back(sequence)
        insort(self.waiting, sequence, key=_urgency)
        self.preemptions += 1
