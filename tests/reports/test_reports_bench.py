"""`bench engine`: the clockwork on an engine whose times are known, and the real one."""

import asyncio

import pytest

from turbomill.engine.requests import GenerationOutput, Usage
from turbomill.errors import UsageError
from turbomill.reports import bench_engine as module
from turbomill.reports.bench_cpu import bench_cpu
from turbomill.reports.bench_engine import Load, bench_engine, measure, run_load, run_mixed
from turbomill.reports.runs import load_run
from turbomill.reports.tables import speeds_cells


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


class SteppingEngine:
    """A step a second: a token for every sequence whose prompt is read; 5 prompt tokens are read a step."""

    def __init__(self, monkeypatch):
        self.now, self.budget, self.queue = 0.0, 0, []
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.tick = asyncio.Event()
        self.stepping = None

    async def steps(self):
        while True:
            for _ in range(30):
                await asyncio.sleep(0)
            self.now += 1
            left = 5
            for entry in self.queue:
                used = min(left, entry[0])
                entry[0] -= used
                left -= used
            tick, self.tick = self.tick, asyncio.Event()
            tick.set()

    async def generate(self, prompt, gen):
        if self.stepping is None:
            self.stepping = asyncio.get_running_loop().create_task(self.steps())
        entry = [len(prompt)]
        self.queue.append(entry)
        made = 0
        while made < gen.max_new_tokens:
            await self.tick.wait()
            if entry[0] == 0:
                made += 1
                yield GenerationOutput("x", (made,), Usage(len(prompt), made))
        self.queue.remove(entry)


def test_mixed_rates_by_hand(monkeypatch):
    """Two sequences of 10 have their first tokens at 2 and 4; two prompts more are read by 6 and 8: 4 s.

    In them both decode a token a second, until each has its 6: of the first, tokens at 5, 6 and 7; of the
    second at 5, 6, 7 and 8.
    """

    async def both():
        engine = SteppingEngine(monkeypatch)
        try:
            return await run_mixed(engine, Load(2, 10, 6), 100)
        finally:
            engine.stepping.cancel()

    prefill, decode = asyncio.run(both())
    assert prefill == 2 * 10 / 4 and decode == pytest.approx(7 / 4)


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
    assert load_run(tmp_path) == run and run.engine[0].mixed_decode_tok_s is None


def test_mixed_on_a_tiny_model(tiny):
    pytest.importorskip("turbomill._core")
    (speed,) = bench_engine(str(tiny), [Load(2, 64, 64)], rounds=1, num_threads=2, mixed=True).engine
    assert speed.mixed_prefill_tok_s > 0 and speed.mixed_decode_tok_s >= 0
    columns, (row,) = speeds_cells([speed])
    assert len(columns) == len(row) == 7 and row[5] == f"{speed.mixed_prefill_tok_s:,.1f}"
    plain = speed.model_copy(update={"mixed_prefill_tok_s": None, "mixed_decode_tok_s": None})
    assert len(speeds_cells([plain])[0]) == 5


def test_longer_than_the_context_is_refused_first(tiny):
    with pytest.raises(UsageError, match="300 together, but the model's context is 256"):
        bench_engine(str(tiny), [Load(1, 8, 8), Load(1, 200, 100)])


PEER = """#!/bin/sh
echo '{"version": "7"}'
while read line; do echo '{"prefill_tok_s": 50, "decode_tok_s": 4}'; done
"""


def test_beside_a_peer_and_without_one(tiny, tmp_path):
    """The peer speaks lines of JSON; without one, what it said instead is told and ours are measured."""
    peer = tmp_path / "peer"
    peer.write_text(PEER)
    peer.chmod(0o755)
    given = {"activations": "auto", "threads": 1, "rounds": 1, "only": "1 stream"}
    found = bench_cpu(str(tiny), peer_python=str(peer), **given)
    [row] = found["rows"]
    assert (found["peer"], row["peer"]) == ("llama-cpp-python 7", 4) and row["ours"] > 0
    peer.write_text("#!/bin/sh\necho 'no module named llama_cpp' >&2\n")
    alone = bench_cpu(str(tiny), peer_python=str(peer), **given)
    assert alone["peer"] == "llama-cpp-python: no module named llama_cpp"
    assert alone["rows"][0]["peer"] is None and alone["rows"][0]["ours"] > 0
    assert bench_cpu(str(tiny), peer_python=str(tmp_path / "none"), **given)["rows"][0]["peer"] is None
