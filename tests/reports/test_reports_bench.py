"""`bench engine`: the clockwork on an engine whose times are known, and the real one."""

import asyncio

import pytest

from turbomill.engine.requests import GenerationOutput, Usage
from turbomill.errors import UsageError
from turbomill.reports import bench_engine as module
from turbomill.reports.bench_engine import Load, bench_engine, measure, run_load
from turbomill.reports.runs import load_run


class ClockedEngine:
    """A token at each tick; sequence i starts i ticks late. Time stands still otherwise."""

    def __init__(self, monkeypatch):
        self.now, self.started, self.requests = 0.0, 0, []
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    async def generate(self, prompt, gen):
        self.requests.append((prompt, gen))
        late = self.started
        self.started += 1
        for number in range(gen.max_new_tokens):
            due = 1.0 + late + number
            while self.now < due:
                await asyncio.sleep(0)
                if all_waiting(self, due):
                    self.now = due
            yield GenerationOutput("x", (number,), Usage(len(prompt), number + 1))


def all_waiting(engine, due):
    # Ticks are whole seconds: the next one may come when nobody is owed an earlier one.
    return due == engine.now + 1


def test_rates_by_hand(monkeypatch):
    """Two sequences of 10 + 4: first tokens at 1 and 2, last at 4 and 5."""
    engine = ClockedEngine(monkeypatch)
    prefill, decode = asyncio.run(run_load(engine, Load(2, 10, 4), 100))
    assert prefill == 2 * 10 / 2
    # After second 2: tokens at 3 and 4 of the first, 3, 4 and 5 of the second.
    assert decode == pytest.approx(5 / 3)
    assert all(gen.ignore_eos and gen.max_new_tokens == 4 for _, gen in engine.requests)
    assert all(len(prompt) == 10 and max(prompt) < 100 for prompt, _ in engine.requests)


def test_warm_up_does_not_count_and_the_median_is_taken(monkeypatch):
    rates = iter([(1.0, 1.0), (10.0, 5.0), (30.0, 7.0), (20.0, 6.0)])

    async def fake(*_):
        return next(rates)

    monkeypatch.setattr(module, "run_load", fake)
    speed = measure(None, Load(1, 1, 2), 10, rounds=3, warmup=1)
    assert (speed.prefill_tok_s, speed.decode_tok_s, speed.rounds) == (20.0, 6.0, 3)


def test_prompts_are_repeatable_and_differ():
    load = Load(3, 20, 2)
    assert load.prompts(50, 1) == load.prompts(50, 1) != load.prompts(50, 2)
    assert len({tuple(p) for p in load.prompts(50, 1)}) == 3


@pytest.mark.parametrize(
    ("sizes", "option"),
    [((0, 1, 2), "--concurrency"), ((1, 0, 2), "--prompt-tokens"), ((1, 1, 1), "--completion-tokens")],
)
def test_loads_are_checked(sizes, option):
    with pytest.raises(UsageError, match=option):
        Load(*sizes)


def test_tiny_model(tiny, tmp_path):
    pytest.importorskip("turbomill._core")
    loads = [Load(1, 16, 8), Load(4, 16, 8)]
    run = bench_engine(str(tiny), loads, rounds=2, num_threads=2, work_dir=tmp_path)
    assert [(s.batch, s.prompt_tokens, s.completion_tokens) for s in run.engine] == [(1, 16, 8), (4, 16, 8)]
    assert all(s.prefill_tok_s > 0 and s.decode_tok_s > 0 and s.rounds == 2 for s in run.engine)
    assert load_run(tmp_path) == run


def test_longer_than_the_context_is_refused_first(tiny):
    with pytest.raises(UsageError, match="300 together, but the model's context is 256"):
        bench_engine(str(tiny), [Load(1, 8, 8), Load(1, 200, 100)])
