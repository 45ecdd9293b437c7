"""`bench serve`: bursts, traces, objectives and the knee."""

import json
import math

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from test_reports_serve import USAGE, chunk

from turbomill.cli import cli
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import bench_serve as module
from turbomill.reports.bench_serve import Knee, TraceFile, bench_serve
from turbomill.reports.latency import RequestResult
from turbomill.reports.load_client import LoadOptions
from turbomill.reports.load_shapes import LoadRequest
from turbomill.reports.render import render_html
from turbomill.reports.runs import load_run
from turbomill.reports.slo import Slo, find_knee
from turbomill.reports.summary import summarize_runs
from turbomill.reports.traces import read_sharegpt
from turbomill.reports.view import report_view


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_are_gamma(shape):
    """Mean 1 / rate whatever the burstiness, and a variance of mean^2 / shape."""
    times = np.array(
        LoadOptions(num_prompts=8000, input_len=1, request_rate=5.0, burstiness=shape).send_times()
    )
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() == pytest.approx(0.2 / math.sqrt(shape), rel=0.1)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_burstiness_is_checked(wrong):
    with pytest.raises(UsageError, match="--burstiness"):
        LoadOptions(burstiness=wrong)


def test_objectives_by_hand():
    slo = Slo.parse(["ttft:100", "tpot:50"])
    good = RequestResult(5, 0.0, 1.0, [0.1, 0.15, 0.2], 3)
    assert slo.met_by(good) and slo.describe() == {"ttft": 100, "tpot": 50}
    late = RequestResult(5, 0.0, 1.0, [0.11, 0.15, 0.2], 3)
    slow = RequestResult(5, 0.0, 1.0, [0.1, 0.15, 0.3], 3)
    failed = RequestResult(5, 0.0, 1.0, [0.1], 1, error="HTTP 500")
    assert not any(slo.met_by(result) for result in (late, slow, failed))
    assert slo.met_by(RequestResult(5, 0.0, 1.0, [0.1], 1))  # one token: no time per token after it
    assert not Slo(e2el=100).met_by(good) and Slo(e2el=200).met_by(good)
    assert Slo.parse([]) is None


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "ttft:0", "speed:3", "tpot:inf", "tpot:-1"])
def test_objectives_are_checked(text):
    with pytest.raises(UsageError, match=f"--goodput {text}: expected ttft, tpot, e2el"):
        Slo.parse([text])


def server_of(capacity, knee):
    """A server that answers `capacity` requests/s at most and keeps the objectives up to `knee`."""
    rates = []

    def measure(rate):
        rates.append(rate)
        good = 1.0 if rate <= knee else 0.5
        return {
            "request_throughput": min(rate, capacity),
            "request_rate": "inf" if math.isinf(rate) else rate,
            "slo_share": good,
        }

    return measure, rates


def test_the_knee_is_found_to_a_part_of_the_range():
    measure, rates = server_of(10.0, 6.3)
    rate, loads = find_knee(measure, 0.99, 6)
    assert rate <= 6.3 < rate + 10 / 2**6 and len(loads) == len(rates) == 7 and rates[0] == math.inf
    found = [load["request_rate"] for load in loads]
    assert found[:-1] == sorted(found[:-1]) and found[-1] == "inf"


def test_a_server_that_is_never_late_and_one_that_always_is():
    measure, rates = server_of(10.0, math.inf)
    assert find_knee(measure, 0.99, 6)[0] == 10 and len(rates) == 1
    assert find_knee(server_of(10.0, 0.0)[0], 0.99, 3)[0] is None


def talks(*pairs):
    return [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in pairs]


@pytest.fixture
def trace(tmp_path):
    def write(content):
        path = tmp_path / "trace.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def words(text):
    return len(text.split())


def test_sharegpt_is_filtered_as_vllm_does(trace):
    rows = talks(
        ("a b c d e", "1 2 3 4"),
        ("too short x", "1 2 3 4 5"),
        ("a b c d f", "1 2 3"),
        ("w " * 1025, "1 2 3 4"),
        ("w " * 1000, "v " * 1049),
        ("a b c d g h", "1 2 3 4 5"),
    )
    rows += [
        {"conversations": []},
        {"id": 3},
        "text",
        {"conversations": [{"value": "a b c d"}, {"value": None}]},
    ]
    path = trace(rows)
    found = read_sharegpt(path, words, 10)
    assert sorted((r.prompt, r.prompt_tokens, r.output_len) for r in found) == [
        ("a b c d e", 5, 4),
        ("a b c d g h", 6, 5),
    ]
    assert {r.output_len for r in read_sharegpt(path, words, 10, output_len=2)} == {2}
    assert len(read_sharegpt(path, words, 1)) == 1 and len(read_sharegpt(path, words, 9, limit=9)) == 1
    many = trace(talks(*((f"a b c d {i}", "1 2 3 4") for i in range(30))))
    orders = [[r.prompt for r in read_sharegpt(many, words, 5, seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ({"a": 1}, "expected a list"),
        (talks(("a", "b")), "none of 1 conversations"),
    ],
)
def test_other_files_are_refused(trace, content, message):
    path = trace(content)
    with pytest.raises(TurbomillError, match=message) as caught:
        read_sharegpt(path, words, 3)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def scripted(monkeypatch, bodies, delay=0.0):
    async def handler(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text=chunk("a") + chunk("b", "length") + USAGE + "data: [DONE]\n\n")

    monkeypatch.setattr(
        module,
        "http_client",
        lambda *_: httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x"),
    )


def test_a_trace_is_sent_with_its_own_lengths(monkeypatch):
    bodies = []
    scripted(monkeypatch, bodies)
    sent = (LoadRequest("first question", 3, 7), LoadRequest("second", 2, 9))
    run = bench_serve(LoadOptions(num_prompts=5, trace=sent), base_url="http://x")
    assert [(b["prompt"], b["max_tokens"]) for b in bodies[1:]] == [("first question", 7), ("second", 9)]
    result = run.serve[0]
    assert result["num_prompts"] == 2 and result["total_input_tokens"] == 5
    assert "random_input_len" not in result and "request_goodput" not in result


def test_goodput_and_knee_of_a_run(monkeypatch, tmp_path):
    scripted(monkeypatch, [])
    options = LoadOptions(num_prompts=4, input_len=2)
    run = bench_serve(
        options, base_url="http://x", slo=Slo(ttft=60_000), knee=Knee(steps=2), work_dir=tmp_path
    )
    # Everything at once is good enough already.
    (load,) = run.serve
    assert load["slo_share"] == 1 and load["request_goodput"] == load["request_throughput"]
    assert load["goodput"] == {"ttft": 60_000} and run.knee["request_rate"] == load["request_throughput"]
    assert load_run(tmp_path) == run and "Up to" in summarize_runs([run])[0]
    never = bench_serve(options, base_url="http://x", slo=Slo(ttft=1e-6), knee=Knee(steps=2))
    assert never.knee["request_rate"] is None and [s["slo_share"] for s in never.serve] == [0, 0, 0]
    assert "No rate that was tried" in summarize_runs([never])[0]


def test_latency_against_rate_is_drawn_with_the_knee(monkeypatch):
    """The loads that had a rate, in a plot of the page; plotly is inside it."""
    scripted(monkeypatch, [])
    options = LoadOptions(num_prompts=3, input_len=2)
    run = bench_serve(options, base_url="http://x", slo=Slo(ttft=1e-6), knee=Knee(steps=3))
    run = run.model_copy(update={"knee": {**run.knee, "request_rate": 1.25}})
    (plot,) = report_view([run]).speed_plots
    figure = json.loads(plot.spec)
    rates = [load["request_rate"] for load in run.serve[:-1]]
    shown = [trace for trace in figure["data"] if trace["meta"]["view"] == 0]
    assert [trace["name"] for trace in shown] == ["median", "p99", "knee"] and len(rates) == 3
    assert shown[1]["y"] == [load["p99_ttft_ms"] for load in run.serve[:-1]]
    assert shown[2]["x"] == [1.25, 1.25] and "The knee is at 1.25 requests/s" in plot.alt
    assert [view["name"] for view in figure["views"]] == ["TTFT", "TPOT", "E2EL"]
    page = render_html(report_view([run, run]))
    assert page.count('id="rate-latency-') == 2 and 'data-plot="rate-latency-1"' in page and "Plotly" in page
    single = bench_serve(options, base_url="http://x")
    assert report_view([single]).speed_plots == [] and "Plotly" not in render_html(report_view([single]))


def test_what_is_asked_for_must_make_sense(tmp_path):
    with pytest.raises(UsageError, match="--find-knee: needs"):
        bench_serve(LoadOptions(), base_url="http://x", knee=Knee())
    with pytest.raises(UsageError, match="--tokenizer"):
        bench_serve(LoadOptions(), base_url="http://x", trace=TraceFile(tmp_path))
    for wrong in ({"share": 0.0}, {"share": 1.1}, {"steps": 0}):
        with pytest.raises(UsageError):
            Knee(**wrong)


def test_a_trace_on_a_real_server(tiny, trace):
    pytest.importorskip("turbomill._core")
    path = trace(talks(*((f"Tell me about {i}, please.", "So be it.") for i in range(9))))
    arguments = ["bench", "serve", str(tiny), "--dataset-path", str(path), "--num-prompts", "4"]
    arguments += ["--sharegpt-output-len", "6", "--burstiness", "0.5", "--request-rate", "50"]
    result = CliRunner().invoke(cli, [*arguments, "--goodput", "e2el:60000", "--num-threads", "2", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["completed"], found["total_output_tokens"], found["burstiness"]) == (4, 24, 0.5)
    assert found["total_input_tokens"] == 4 * 24 and found["slo_share"] == 1 and found["request_goodput"] > 0
