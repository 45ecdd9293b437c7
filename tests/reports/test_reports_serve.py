"""`bench serve`: metrics by hand, a scripted server, and a real one."""

import asyncio
import json
import math

import httpx
import numpy as np
import pytest

from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import bench_serve as module
from turbomill.reports.bench_serve import bench_serve
from turbomill.reports.latency import RequestResult, summarize
from turbomill.reports.load_client import Load, LoadOptions, http_client, send
from turbomill.reports.runs import load_run

# Read by programs that plot results of `vllm bench serve`.
VLLM_FIELDS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
VLLM_FIELDS |= {
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
}
VLLM_FIELDS |= {"num_prompts", "request_rate", "max_concurrency", "model_id", "date", "backend", "burstiness"}
VLLM_FIELDS |= {
    f"{kind}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for kind in ("mean", "median", "std", "p99")
}


def test_metrics_by_hand():
    results = [
        RequestResult(10, start=0.0, end=0.45, arrivals=[0.1, 0.2, 0.4], output_tokens=3),
        RequestResult(20, start=0.3, end=0.7, arrivals=[0.6], output_tokens=1),
        RequestResult(30, start=0.0, end=0.1, error="HTTP 500: no"),
    ]
    found = summarize(results, 2.0)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["HTTP 500: no"])
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 4)
    assert found["request_throughput"] == 1 and found["output_throughput"] == 2
    assert found["total_token_throughput"] == 17 and found["max_concurrent_requests"] == 2
    assert found["mean_ttft_ms"] == pytest.approx((100 + 300) / 2)
    assert found["mean_tpot_ms"] == pytest.approx(150)  # only the first has more than one token
    assert found["mean_itl_ms"] == pytest.approx(150) and found["median_itl_ms"] == pytest.approx(150)
    assert found["mean_e2el_ms"] == pytest.approx((400 + 300) / 2)
    assert found["p90_ttft_ms"] == pytest.approx(np.percentile([100, 300], 90))
    assert found["std_e2el_ms"] == pytest.approx(50)


def test_nothing_completed():
    found = summarize([RequestResult(1, error="x")], 1.0)
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None and found["p99_itl_ms"] is None


def test_one_that_ends_as_another_begins_does_not_overlap():
    results = [RequestResult(1, start=i, end=i + 1, arrivals=[i + 1]) for i in range(5)]
    assert summarize(results, 5.0)["max_concurrent_requests"] == 1


def test_poisson_gaps():
    times = np.array(LoadOptions(num_prompts=4000, request_rate=5.0).send_times())
    gaps = np.diff(times)
    # Mean and standard deviation of an exponential are both 1 / rate.
    assert times[0] == 0 and gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.06)
    assert set(LoadOptions(num_prompts=9).send_times()) == {0.0}


def test_prompts_are_repeatable():
    options = LoadOptions(num_prompts=3, input_len=50, vocab_size=20, seed=4)
    prompts = [talk[0].prompt for talk in options.conversations()]
    assert options.conversations() == options.conversations() and [len(p) for p in prompts] == [50] * 3
    assert max(max(p) for p in prompts) < 20


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"input_len": 0}, "--random-input-len"),
        ({"output_len": 0}, "--random-output-len"),
        ({"max_concurrency": -1}, "--max-concurrency"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
    ],
)
def test_options_are_checked(changes, option):
    with pytest.raises(UsageError, match=option):
        LoadOptions(**changes)


def chunk(text, finish=None, **more):
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish}], **more})}\n\n"


USAGE = f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 5}})}\n\n"


def serving(*lines, status=200):
    """A client whose server answers with these lines."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="".join(lines)))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def answer(*lines, status=200):
    async with serving(*lines, status=status) as client:
        return await send(client, {}, 7)


@pytest.mark.parametrize(
    ("lines", "status", "error"),
    [
        ([chunk("a")], 200, "the stream ended early"),
        (["data: [DONE]\n\n"], 200, "no text came"),
        (["data: {oops\n\n"], 200, "JSONDecodeError"),
        ([chunk("a"), 'data: {"error": {"message": "engine died"}}\n\n'], 200, "engine died"),
        (["too busy"], 503, "HTTP 503: too busy"),
    ],
)
async def test_failures_are_noted(lines, status, error):
    assert error in (await answer(*lines, status=status)).error


async def test_usage_counts_tokens_and_pieces_count_without_it():
    pieces = [chunk("a"), ": a comment\n\n", chunk("b"), chunk("", "length")]
    with_usage = await answer(*pieces, USAGE, "data: [DONE]\n\n")
    without = await answer(*pieces, "data: [DONE]\n\n")
    assert with_usage.error == without.error == ""
    assert (with_usage.output_tokens, without.output_tokens) == (5, 2)
    assert len(with_usage.arrivals) == 3 and with_usage.prompt_tokens == 7


async def test_concurrency_is_limited():
    running, most, bodies = 0, 0, []

    async def handler(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        bodies.append(json.loads(request.content))
        await asyncio.sleep(0.002)
        running -= 1
        return httpx.Response(200, text=chunk("a", "length") + USAGE + "data: [DONE]\n\n")

    options = LoadOptions(num_prompts=12, input_len=3, output_len=5, max_concurrency=3)
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
        results, duration = await Load(client, "m", options).run()
    assert most == 3 and len(results) == 12 and duration > 0
    assert [body["prompt"] for body in bodies] == [talk[0].prompt for talk in options.conversations()]
    assert all(b["max_tokens"] == 5 and b["stream"] and b["ignore_eos"] for b in bodies)


async def test_open_loop_does_not_wait_for_answers():
    """At 200 requests/s and answers that take 50 ms, many run at once."""

    async def handler(request):
        await asyncio.sleep(0.05)
        return httpx.Response(200, text=chunk("a", "length") + "data: [DONE]\n\n")

    options = LoadOptions(num_prompts=20, request_rate=200.0)
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
        results, _ = await Load(client, "m", options).run()
    assert summarize(results, 1.0)["max_concurrent_requests"] > 3
    # Never before it was due.
    assert results[-1].start - results[0].start >= options.send_times()[-1] - 0.01


def scripted(monkeypatch, fail):
    """Replaces the HTTP client; request number n fails when `fail(n)`."""
    count = -1

    def handler(request):
        nonlocal count
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        count += 1
        if fail(count):
            return httpx.Response(500, text="broken")
        return httpx.Response(200, text=chunk("a") + chunk("b", "length") + USAGE + "data: [DONE]\n\n")

    transport = httpx.MockTransport(handler)
    monkeypatch.setattr(
        module, "http_client", lambda *_: httpx.AsyncClient(transport=transport, base_url="http://x")
    )


def test_some_failures_are_counted(monkeypatch, tmp_path):
    scripted(monkeypatch, lambda n: n in (2, 3))
    run = bench_serve(LoadOptions(num_prompts=5), base_url="http://x", work_dir=tmp_path)
    result = run.serve[0]
    assert (result["completed"], result["failed"], result["model_id"]) == (3, 2, "served")
    assert result.keys() >= VLLM_FIELDS and result["request_rate"] == "inf"
    assert load_run(tmp_path) == run and run.status == "complete"


def test_all_failed_is_a_failed_run(monkeypatch, tmp_path):
    scripted(monkeypatch, lambda n: n > 0)
    with pytest.raises(TurbomillError, match="all 3 requests failed, the first with: HTTP 500: broken"):
        bench_serve(LoadOptions(num_prompts=3), base_url="http://x", work_dir=tmp_path)
    assert load_run(tmp_path).status == "failed"


def test_a_load_that_cannot_run_is_not_sent(monkeypatch):
    scripted(monkeypatch, lambda n: True)
    with pytest.raises(TurbomillError, match="no load was sent: HTTP 500"):
        bench_serve(LoadOptions(), base_url="http://x")


def test_no_server():
    with pytest.raises(
        TurbomillError, match=r"127\.0\.0\.1:9.*no OpenAI-compatible server.*serve api_server"
    ):
        bench_serve(LoadOptions(), base_url="http://127.0.0.1:9")


def test_exactly_one_server():
    for both in ({}, {"model": "a", "base_url": "b"}):
        with pytest.raises(UsageError, match=r"either MODEL.* or --base-url"):
            bench_serve(LoadOptions(), **both)


def test_a_local_server_is_not_asked_through_a_proxy():
    assert not http_client("http://127.0.0.1:1/").trust_env and http_client("http://example.com").trust_env


def test_longer_than_the_context(tiny):
    with pytest.raises(UsageError, match="300 together"):
        bench_serve(LoadOptions(input_len=200, output_len=100), model=str(tiny))


def test_real_server(tiny, tmp_path):
    pytest.importorskip("turbomill._core")
    options = LoadOptions(num_prompts=6, input_len=12, output_len=40, max_concurrency=2)
    run = bench_serve(options, model=str(tiny), num_threads=2, work_dir=tmp_path)
    result = run.serve[0]
    assert (result["completed"], result["failed"]) == (6, 0), result["errors"]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (72, 240)
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"] and result["p99_tpot_ms"] > 0
    assert 1 <= result["max_concurrent_requests"] <= 2
