"""`bench serve`: lengths, prefixes, turns, counts that disagree, and servers that give up."""

import asyncio
import json
import random
import time

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from test_reports_serve import USAGE, chunk

from turbomill.cli import cli
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import bench_serve as module
from turbomill.reports.bench_serve import Knee, TraceFile, bench_serve
from turbomill.reports.load_client import Load, LoadOptions
from turbomill.reports.load_shapes import LoadRequest, Shape, longest
from turbomill.reports.runs import load_run
from turbomill.reports.slo import Slo
from turbomill.reports.view import report_view


def test_uniform_lengths_are_vllms():
    """Every length from mean (1 - ratio) to mean (1 + ratio), equally often."""
    found = np.array(Shape(0.2).lengths(50, 20_000, random.Random(0)))
    assert found.min() == 40 and found.max() == 60 and found.mean() == pytest.approx(50, rel=0.01)
    counts = np.bincount(found)[40:]
    assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()
    assert Shape().lengths(7, 3, random.Random(0)) == [7, 7, 7]
    assert min(Shape(1.0).lengths(2, 500, random.Random(0))) == 1


def test_lognormal_lengths_have_the_mean_and_a_tail():
    found = np.array(Shape(0.8, "lognormal").lengths(200, 50_000, random.Random(0)))
    assert found.mean() == pytest.approx(200, rel=0.02) and found.std() == pytest.approx(160, rel=0.05)
    assert np.median(found) < 165 and np.quantile(found, 0.99) > 750 and found.min() >= 1


def test_conversations_share_a_prefix_and_nothing_else():
    shape = Shape(prefix_len=6, turns=3)
    talks = shape.conversations(4, 5, 2, 1000, seed=1)
    assert talks == shape.conversations(4, 5, 2, 1000, seed=1) != shape.conversations(4, 5, 2, 1000, seed=2)
    assert [len(talk) for talk in talks] == [3] * 4
    assert len({tuple(talk[0].prompt[:6]) for talk in talks}) == 1
    assert len({tuple(talk[0].prompt[6:]) for talk in talks}) == 4
    assert [turn.prompt_tokens for turn in talks[0]] == [11, 5, 5] and longest(talks) == 21 + 3 * 2


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ((-0.1,), "--random-range-ratio"),
        ((1.1,), "--random-range-ratio"),
        ((11.0, "lognormal"), "--random-range-ratio"),
        ((0.1, "normal"), "--length-distribution"),
        ((0, "uniform", -1), "--random-prefix-len"),
        ((0, "uniform", 0, 0), "--num-turns"),
    ],
)
def test_shapes_are_checked(given, option):
    with pytest.raises(UsageError, match=option):
        Shape(*given)


def bytes_of(text):
    return list(text.encode())


def client_of(handler):
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x")


async def test_a_turn_repeats_what_was_said_before():
    bodies = []

    def handler(request):
        bodies.append(json.loads(request.content))
        text = chunk(f"{len(bodies)}b") + chunk("", "length") + "data: [DONE]\n\n"
        return httpx.Response(200, text=text)

    options = LoadOptions(num_prompts=1, input_len=3, output_len=2, shape=Shape(prefix_len=2, turns=3))
    async with client_of(handler) as client:
        results, _ = await Load(client, "m", options, tokenize=bytes_of).run()
    (talk,) = options.conversations()
    first = talk[0].prompt
    second = [*first, *b"1b", *talk[1].prompt]
    assert [body["prompt"] for body in bodies] == [first, second, [*second, *b"2b", *talk[2].prompt]]
    assert [r.prompt_tokens for r in results] == [5, 10, 15] and not any(r.error for r in results)


async def test_after_a_failed_turn_no_other_is_sent():
    sent = []

    def handler(request):
        sent.append(1)
        return httpx.Response(429, text="too many")

    options = LoadOptions(num_prompts=2, shape=Shape(turns=2))
    async with client_of(handler) as client:
        results, _ = await Load(client, "m", options, tokenize=bytes_of).run()
    assert len(sent) == 2 and [r.error.split(":")[0] for r in results] == ["HTTP 429", "not sent"] * 2
    assert [r.rejected for r in results] == [True, False] * 2


def scripted(monkeypatch, answer, models=None):
    """Replaces the HTTP client. `answer(n)` is the response to the n-th completion, or an error to raise."""
    count = -1

    def handler(request):
        nonlocal count
        if request.method == "GET":
            if models is not None:
                models()
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        count += 1
        found = answer(count)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(module, "http_client", lambda *_: client_of(handler))


def text_of(*pieces, usage=USAGE):
    lines = "".join(chunk(piece) for piece in pieces) + chunk("", "length") + usage
    return httpx.Response(200, text=lines + "data: [DONE]\n\n")


def test_tokens_are_counted_again_from_the_text(monkeypatch):
    """The server says 5, the pieces are 2, the text is 6 bytes: each is told."""
    monkeypatch.setattr(module, "_tokenize", lambda _model, _backend: bytes_of)
    options = LoadOptions(num_prompts=2, output_len=6)
    scripted(monkeypatch, lambda n: text_of("abc", "def"))
    load = bench_serve(options, base_url="http://x", tokenizer="t").serve[0]
    assert (load["total_output_tokens"], load["retokenized_output_tokens"]) == (10, 12)
    assert load["lengths_missed"] == 2, "6 were asked for, and the server counts 5"
    # Of a server that counts nothing, the text is counted; without a tokenizer the pieces.
    scripted(monkeypatch, lambda n: text_of("abc", "def", usage=""))
    load = bench_serve(options, base_url="http://x", tokenizer="t").serve[0]
    assert (load["total_output_tokens"], load["lengths_missed"]) == (12, 0)
    load = bench_serve(options, base_url="http://x").serve[0]
    assert (load["total_output_tokens"], load["retokenized_output_tokens"]) == (4, None)
    assert load["lengths_missed"] == 2


def test_rejections_and_lengths_missed_are_reported(monkeypatch):
    def answer(n):
        return httpx.Response(503, text="full") if n == 2 else text_of("a", "b")

    scripted(monkeypatch, answer)
    run = bench_serve(LoadOptions(num_prompts=4, output_len=9), base_url="http://x")
    load = run.serve[0]
    assert (load["completed"], load["failed"], load["rejected"], load["lengths_missed"]) == (3, 1, 1, 3)
    (table,) = report_view([run]).speed_tables
    assert "1 failed (1 of them rejected, 3 answers of another length than asked for)" in table.note


def dies_after(number):
    """Answers `number` completions; then nothing answers any more, the list of models neither."""
    gone = []

    def answer(n):
        if n >= number:
            gone.append(1)
            return httpx.ConnectError("refused")
        return text_of("a")

    def models():
        if gone:
            raise httpx.ConnectError("refused")

    return answer, models


def test_a_server_that_stops_midway_leaves_what_there_was(monkeypatch, tmp_path):
    """One completion warms up, three of the load are answered; of the other nine few are tried at all."""
    scripted(monkeypatch, *dies_after(4))
    options = LoadOptions(num_prompts=12, output_len=5, max_concurrency=1)
    with pytest.raises(TurbomillError, match="the server stopped after 3 of 12 requests") as caught:
        bench_serve(options, base_url="http://x", work_dir=tmp_path)
    assert "\n" not in str(caught.value)
    run = load_run(tmp_path)
    load = run.serve[0]
    assert run.status == "failed" and load["server_stopped"] and load["median_ttft_ms"] is not None
    assert (load["completed"], load["failed"], load["rejected"]) == (3, 9, 0)
    assert sum("not sent: the server had stopped" in error for error in load["errors"]) == 8
    view = report_view([run])
    assert "the server stopped" in view.speed_tables[0].note and view.verdict.tone == "bad"


def test_a_knee_keeps_the_loads_before_the_server_stopped(monkeypatch, tmp_path):
    scripted(monkeypatch, *dies_after(2 * 4 + 2))  # each of the loads warms up with one, and has three
    options = LoadOptions(num_prompts=3, max_concurrency=1)
    with pytest.raises(TurbomillError, match="the server stopped after 1 of 3"):
        bench_serve(options, base_url="http://x", slo=Slo(ttft=1e-6), knee=Knee(steps=4), work_dir=tmp_path)
    run = load_run(tmp_path)
    assert [load["completed"] for load in run.serve] == [3, 3, 1] and run.knee is None


def test_one_lost_connection_is_no_stopped_server(monkeypatch):
    scripted(monkeypatch, lambda n: httpx.ReadError("reset") if n == 2 else text_of("a"))
    run = bench_serve(LoadOptions(num_prompts=4), base_url="http://x")
    assert run.status == "complete" and not run.serve[0]["server_stopped"] and run.serve[0]["failed"] == 1


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch):
    """Back by an hour at every look; durations are of the monotonic clock."""
    now = [2e9]

    def jumping():
        now[0] -= 3600
        return now[0]

    async def slow(request):
        await asyncio.sleep(0.02)
        return text_of("a", "b")

    monkeypatch.setattr(time, "time", jumping)

    async def load():
        async with client_of(slow) as client:
            return await Load(client, "m", LoadOptions(num_prompts=4, request_rate=100.0)).run()

    results, duration = asyncio.run(load())
    assert 0.02 <= duration < 20 and all(0.015 < r.ttft <= r.e2el <= duration for r in results)


def test_turns_need_a_tokenizer(tmp_path):
    turns = LoadOptions(shape=Shape(turns=2))
    with pytest.raises(UsageError, match=r"--num-turns: .*--tokenizer"):
        bench_serve(turns, base_url="http://x")
    with pytest.raises(UsageError, match=r"--num-turns: .*--dataset-path"):
        bench_serve(turns, base_url="http://x", trace=TraceFile(tmp_path, tokenizer="t"), tokenizer="t")


def test_conversations_on_a_real_server(tiny):
    """Later turns come from the prefix cache; lengths vary as they were drawn."""
    pytest.importorskip("turbomill._core")
    arguments = [
        "bench",
        "serve",
        str(tiny),
        "--num-prompts",
        "2",
        "--num-turns",
        "2",
        "--random-input-len",
        "40",
    ]
    arguments += ["--random-output-len", "8", "--random-range-ratio", "0.25", "--random-prefix-len", "16"]
    result = CliRunner().invoke(cli, [*arguments, "--num-threads", "2", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    talks = Shape(0.25, prefix_len=16, turns=2).conversations(2, 40, 8, 256, 0)
    asked = sum(turn.output_len for talk in talks for turn in talk)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (4, 0, asked)
    assert found["num_turns"] == 2 and found["lengths_missed"] == 0 and found["retokenized_output_tokens"] > 0
    new = sum(turn.prompt_tokens for talk in talks for turn in talk)
    again = sum(talk[0].prompt_tokens for talk in talks)
    assert new + again < found["total_input_tokens"] <= new + again + sum(t[0].output_len for t in talks)
    assert isinstance(talks[0][0], LoadRequest)
