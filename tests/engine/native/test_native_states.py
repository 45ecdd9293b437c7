"""Random adds, cancels, steps and failures over the scheduler and the pool, with a device that cannot lie."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fake_device import STOP, VOCAB, FakeDevice, P, next_token, whole_text
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turbomill import _core

SESSION = 5 * P
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
}
TOKEN = st.integers(0, VOCAB - 1)


def grown(prefix: list[int], length: int) -> list[int]:
    """A text that the model writes: prompts built from it coincide with what others generate."""
    text = list(prefix)
    while len(text) < length:
        text.append(next_token(text))
    return text


PROMPTS = st.one_of(
    st.lists(TOKEN, min_size=1, max_size=SESSION - 4),
    st.builds(
        lambda start, length, tail: [*grown([start], length), *tail],
        st.integers(0, 1),
        st.integers(1, SESSION - 8),
        st.lists(TOKEN, max_size=3),
    ),
)


class Orchestration(RuleBasedStateMachine):
    """Steps are planned up to two ahead and end in order, as on a real device."""

    @initialize(
        blocks=st.integers(5, 12),
        batch=st.integers(1, 4),
        budget=st.integers(1, 20),
        sharing=st.sampled_from([True, True, True, False]),
    )
    def start(self, blocks: int, batch: int, budget: int, sharing: bool) -> None:
        config = _core.EngineConfig(
            block_len=P,
            cache_block_count=blocks,
            max_batch_size=batch,
            max_prefill_token_num=budget,
            session_len=SESSION,
            enable_prefix_caching=sharing,
        )
        self.harness = _core.harness.Harness(_core.ModelConfig(**MODEL), config)
        self.device = FakeDevice(blocks)
        self.issued: list[tuple[list[dict[str, Any]], list[tuple[int, int]]]] = []
        self.requests: dict[int, tuple[list[int], int]] = {}  # prompt, tokens wanted
        self.received: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.guided: set[int] = set()
        self.waits: dict[int, int] = {}  # guided, and the position whose mask has not come
        self.masks: dict[int, int] = {}  # guided, and the position whose mask is there
        self.broken: set[int] = set()  # ended early: nobody sees what they still compute

    @rule(
        prompt=PROMPTS,
        new=st.integers(0, 2 * P),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        guided=st.sampled_from([False, False, True]),
    )
    def add(self, prompt: list[int], new: int, priority: int, guided: bool) -> None:
        new = min(new, SESSION - len(prompt))
        request = _core.Request(
            token_ids=prompt,
            max_new_tokens=new,
            priority=priority,
            stop_token_ids=[STOP],
            guided=guided and new > 0,
        )
        number = self.harness.submit(request)
        if request.guided:
            self.waits[number] = 0
            self.guided.add(number)
        self.requests[number] = (prompt, new)
        self.received[number] = []
        self.device.texts[number] = list(prompt)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def add_again(self, data: Any) -> None:
        """The same prompt, or one that goes on from what another request has received."""
        number = data.draw(st.sampled_from(sorted(self.requests)))
        prompt = self.requests[number][0] + data.draw(st.sampled_from([[], self.received[number]]))
        if len(prompt) < SESSION:
            self.add(prompt, data.draw(st.integers(0, P)), 0, data.draw(st.booleans()))

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def allow(self, data: Any) -> None:
        self.allow_all(data.draw(st.sampled_from(sorted(self.waits))))

    def allow_all(self, number: int) -> None:
        self.masks[number] = self.waits.pop(number)
        self.harness.allow(number, self.masks[number], list(range(VOCAB)))
        self.take_outputs()
        assert number not in self.ended

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        self.harness.cancel(number)
        self.take_outputs()
        assert number in self.ended

    @precondition(lambda self: len(self.issued) < 2)
    @rule()
    def plan(self) -> None:
        planned = self.harness.plan()
        if planned is not None:
            self.issued.append(planned)
            for number in {s["sequence"] for s in planned[0] if s["sample"]} & self.guided:
                assert self.masks.pop(number) == len(self.received[number]), "a sample without its mask"
        self.take_outputs()

    @precondition(lambda self: self.issued)
    @rule()
    def complete(self) -> None:
        slices, copies = self.issued.pop(0)
        self.harness.complete(self.device.run(slices, copies, self.broken))
        self.take_outputs()

    @precondition(lambda self: self.issued)
    @rule()
    def fail_step(self) -> None:
        slices, copies = self.issued.pop(0)
        tokens = self.device.fail(slices, copies)
        self.harness.complete(tokens, "broken")
        self.take_outputs()
        assert all(s["sequence"] in self.ended for s in slices)

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def one_row_is_not_finite(self, data: Any) -> None:
        slices, copies = self.issued.pop(0)
        tokens = self.device.run(slices, copies, self.broken)
        bad = data.draw(st.integers(0, len(slices) - 1))
        sampled = slices[bad]["sample"]
        if sampled:
            tokens[bad] = -1
        self.harness.complete(tokens)
        self.take_outputs()
        assert not sampled or slices[bad]["sequence"] in self.ended

    def take_outputs(self) -> None:
        for output in self.harness.outputs():
            assert output.id not in self.ended, "an output after the last"
            self.received[output.id] += output.token_ids
            if output.id in self.guided and output.token_ids:
                self.waits[output.id] = len(self.received[output.id])
            if output.finish_reason:
                self.waits.pop(output.id, None)
                self.ended[output.id] = output.finish_reason
                if output.finish_reason in ("error", "cancelled"):
                    self.broken.add(output.id)
            prompt, new = self.requests[output.id]
            expected = whole_text(prompt, new)
            got = self.received[output.id]
            if output.finish_reason in ("stop", "length"):
                assert got == expected
                assert output.finish_reason == ("length" if len(got) == new else "stop")
            else:
                assert got == expected[: len(got)]

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "harness"):
            return
        blocks, running = self.harness.blocks(), self.harness.running()
        metrics = self.harness.metrics()
        held = Counter(page for _, pages, *_ in running for page in pages)
        states = Counter[str]()
        for page, (users, tokens, parent, writer) in enumerate(blocks):
            assert users == held[page]
            states["used" if users else "cached" if tokens else "free"] += 1
            assert len(tokens) <= P and (parent == -2) == (not tokens)
            assert writer == 0 or writer in {number for number, *_ in running}
            if parent >= 0:
                assert len(blocks[parent][1]) == P, "a block continues one that is not whole"
                assert not users or blocks[parent][0], "a used block continues one that may be evicted"
        assert metrics.free_blocks == states["free"] and metrics.cached_blocks == states["cached"]
        assert metrics.total_blocks == len(blocks) == sum(states.values())
        assert metrics.running == len(running) and (len(running) == 0 or metrics.steps > 0)
        for number, pages, scheduled, recorded, _ in running:
            assert len(set(pages)) == len(pages) >= -(-scheduled // P)
            assert recorded <= scheduled
            # What it writes next belongs to nobody else.
            assert all(held[page] == 1 for page in pages[scheduled // P :])
            if number not in self.broken:
                shown = [token for page in pages for token in blocks[page][1]]
                assert not shown or shown[:recorded] == self.device.texts[number][:recorded]

    @invariant()
    def recorded_is_what_was_written(self) -> None:
        """When no step is in flight, every block that can be found holds what it says."""
        if hasattr(self, "harness") and not self.issued:
            for page, (_, tokens, *_) in enumerate(self.harness.blocks()):
                assert self.device.pages[page][: len(tokens)] == tokens

    def teardown(self) -> None:
        """Nothing starves: with no more to come, everything ends, and every block is back."""
        if not hasattr(self, "harness"):
            return
        work = sum(len(prompt) + new + 2 for prompt, new in self.requests.values())
        for _ in range(20 * work + 20):
            for number in sorted(self.waits):
                self.allow_all(number)
            self.plan_if_free()
            if not self.issued:
                break
            self.complete()
            self.blocks_add_up()
        assert set(self.ended) == set(self.requests)
        metrics = self.harness.metrics()
        assert metrics.free_blocks + metrics.cached_blocks == metrics.total_blocks
        assert metrics.waiting == metrics.running == 0

    def plan_if_free(self) -> None:
        while len(self.issued) < 2:
            before = len(self.issued)
            self.plan()
            if len(self.issued) == before:
                return


TestOrchestration = Orchestration.TestCase
TestOrchestration.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
