"""Random adds, cancels, masks and steps over scheduler and pool, with a cache that remembers its writers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turbomill.engine.pytorch.blocks import BlockPool
from turbomill.engine.pytorch.records import Request, Sequence, Slice
from turbomill.engine.pytorch.results import Results
from turbomill.engine.pytorch.rules import LogitRules
from turbomill.engine.pytorch.scheduler import Scheduler

P, VOCAB = 4, 5
SESSION = 5 * P
TOKEN = st.integers(0, VOCAB - 1)


def next_token(tokens: list[int]) -> int:
    """Depends on the whole text."""
    return sum((i + 1) * token for i, token in enumerate(tokens, 1)) % VOCAB


def whole_text(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Orchestration(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(5, 12), batch=st.integers(1, 4), budget=st.integers(1, 20), sharing=st.booleans()
    )
    def start(self, blocks: int, batch: int, budget: int, sharing: bool) -> None:
        self.batch, self.budget, self.sharing = batch, budget, sharing
        self.scheduler = Scheduler(BlockPool(blocks, P, sharing), batch, budget)
        self.results = Results(self.scheduler, VOCAB)
        self.cache: list[Any] = [None] * (blocks * P)  # by slot: the text up to there
        self.requests: dict[int, Request] = {}
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    @rule(
        prompt=st.one_of(
            st.lists(TOKEN, min_size=1, max_size=SESSION - 4),
            st.builds(
                lambda n, tail: whole_text([1], n) + tail, st.integers(1, 12), st.lists(TOKEN, max_size=2)
            ),
        ),
        count=st.integers(0, 6),
        priority=st.integers(0, 1),
        logprobs=st.sampled_from([-1, -1, 0]),
        guided=st.sampled_from([False, False, True]),
    )
    def add(self, prompt: list[int], count: int, priority: int, logprobs: int, guided: bool) -> None:
        request = Request(
            token_ids=prompt,
            max_new_tokens=min(count, SESSION - len(prompt)),
            priority=priority,
            prompt_logprobs=logprobs,
            return_logits=count == 0,
            guided=guided and count > 0,
        )
        number = len(self.requests) + 1
        rules = LogitRules(request, VOCAB, torch.device("cpu")) if request.guided else None
        self.requests[number], self.texts[number] = request, []
        self.scheduler.add(Sequence(number, request, rules))

    @rule(index=st.integers(0, 30))
    def cancel(self, index: int) -> None:
        if sequences := self.scheduler.all():
            self.results.finish(sequences[index % len(sequences)], "cancelled")
            self.collect()

    @rule()
    def send_masks(self) -> None:
        for sequence in self.scheduler.all():
            if sequence.request.guided and sequence.rules is not None and not sequence.ready:
                sequence.rules.allow(b"\xff", VOCAB, torch.device("cpu"))
                sequence.allowed_at = sequence.generated

    @precondition(lambda self: self.requests)
    @rule()
    def sleep(self) -> None:
        self.scheduler.drop_blocks()
        self.cache = [None] * len(self.cache)
        assert self.scheduler.pool.free == self.scheduler.pool.total

    @rule()
    def step(self) -> None:
        self.advance()

    def advance(self) -> bool:
        slices = self.scheduler.plan()
        decodes = [piece for piece in slices if len(piece.tokens) == 1]
        prompts = [piece for piece in slices if len(piece.tokens) > 1]
        assert len(decodes) + len(prompts) <= self.batch
        assert sum(len(piece.tokens) for piece in prompts) <= self.budget
        if slices:
            self.results.take(slices, [self.run(piece) for piece in slices])
            self.collect()
        return bool(slices)

    def run(self, piece: Slice) -> torch.Tensor:
        """Checks that the cache holds what goes before, writes, and makes the next tokens the likeliest."""
        sequence = piece.sequence
        slots = [sequence.blocks[at // P] * P + at % P for at in range(piece.end)]
        for at in range(piece.context):
            assert self.cache[slots[at]] == sequence.tokens[: at + 1]
        assert piece.tokens == sequence.tokens[piece.context : piece.end]
        for at in range(piece.context, piece.end):
            self.cache[slots[at]] = sequence.tokens[: at + 1]
        rows = torch.zeros(len(piece.tokens), VOCAB)
        for row, at in enumerate(range(piece.context, piece.end)):
            rows[row, next_token(sequence.tokens[: at + 1])] = 9
        return rows if piece.all_rows else rows[-1:]

    def collect(self) -> None:
        for output in self.results.outputs():
            assert output.id not in self.ends
            self.texts[output.id] += output.token_ids
            if output.finish_reason:
                self.ends[output.id] = output.finish_reason

    @invariant()
    def every_page_is_free_cached_or_used(self) -> None:
        if not self.requests:
            return
        pool, running = self.scheduler.pool, self.scheduler.running
        used = Counter(page for sequence in running for page in sequence.blocks)
        assert pool.free + pool.cached + len(used) == pool.total
        assert [pool._users[page] for page in range(pool.total)] == [used[p] for p in range(pool.total)]
        assert not any(sequence.blocks for sequence in self.scheduler.waiting)
        assert self.sharing or (pool.cached == 0 and max(used.values(), default=1) == 1)

    @invariant()
    def texts_are_right(self) -> None:
        for number, tokens in self.texts.items():
            request = self.requests[number]
            assert tokens == whole_text(request.token_ids, len(tokens))
            if self.ends.get(number) == "length":
                assert len(tokens) == request.max_new_tokens

    def teardown(self) -> None:
        if not getattr(self, "requests", None):
            return
        for _ in range(2000):
            self.send_masks()
            if not self.advance():
                break
        assert set(self.ends) == set(self.requests), "somebody waits for ever"
        assert self.scheduler.pool.free + self.scheduler.pool.cached == self.scheduler.pool.total


TestOrchestration = Orchestration.TestCase
TestOrchestration.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_prompts_that_begin_alike_share_whole_pages_and_the_least_used_go_first() -> None:
    pool = BlockPool(4, P, True)
    scheduler = Scheduler(pool, 4, 100)
    results = Results(scheduler, VOCAB)

    def run(number: int, prompt: list[int]) -> int:
        scheduler.add(Sequence(number, Request(token_ids=prompt, max_new_tokens=1), None))
        while slices := scheduler.plan():
            results.take(slices, [torch.eye(1, VOCAB) for _ in slices])
        return results.outputs()[-1].cached_tokens

    first = [1, 2, 3, 4, 1, 2, 3, 4, 2]
    assert run(1, first) == 0
    assert run(2, first) == 8  # the last token is always computed
    assert run(3, first[:8]) == 4
    assert run(4, [*first[:6], 0, 0, 0]) == 4
    assert pool.evictions == 0 and pool.cached == 3 and pool.free == 1
    assert run(5, [3] * 13) == 0  # four pages
    assert pool.evictions == 3
    assert run(6, first) == 0


def test_the_last_in_line_gives_way() -> None:
    """And comes back with its text, in its old place."""
    scheduler = Scheduler(BlockPool(6, P, False), 4, 100)
    results = Results(scheduler, VOCAB)
    for number, length, count in ((1, 9, 6), (2, 6, 7)):
        scheduler.add(Sequence(number, Request(token_ids=[1] * length, max_new_tokens=count), None))
    ran, texts = [], {1: 0, 2: 0}
    while slices := scheduler.plan():
        ran.append([piece.sequence.id for piece in slices])
        results.take(slices, [torch.eye(1, VOCAB) for _ in slices])
        for output in results.outputs():
            texts[output.id] += len(output.token_ids)
    # In the fifth step the first one needs the page that the second took in the fourth.
    assert ran == [[1, 2]] * 4 + [[1]] * 2 + [[2]] * 3
    assert scheduler.preemptions == 1 and texts == {1: 6, 2: 7}
