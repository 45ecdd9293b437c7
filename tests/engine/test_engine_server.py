"""The OpenAI protocol over the double, through the openai SDK: answers can be computed by hand."""

import asyncio
import json
import time

import httpx
import openai
import pytest
from server_thread import serving

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def url(fake_engine):
    with serving(fake_engine) as url:
        yield url


@pytest.fixture
async def client(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


async def until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        await asyncio.sleep(0.01)


async def test_models(client):
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == ["tiny"] and listed[0].max_model_len == 512
    assert (await client.models.retrieve("tiny")).owned_by == "turbomill"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_chat(client, fake_engine):
    answer = await client.chat.completions.create(
        model="tiny", messages=user("hi"), temperature=0, max_completion_tokens=4
    )
    choice = answer.choices[0]
    # The prompt ends with the template's ">", whose successor the double's arithmetic gives.
    prompt = fake_engine.encode(user("hi"))
    assert choice.message.role == "assistant" and len(choice.message.content) == 4
    first = 97 + (prompt[-1] - 97 + 1) % 26
    assert choice.message.content == "".join(chr(97 + (first - 97 + i) % 26) for i in range(4))
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 4)
    assert answer.usage.total_tokens == len(prompt) + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 3  # the double says so


async def test_chat_content_parts_and_developer_role(client, fake_engine):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    await client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    sent = bytes(fake_engine._engine.requests[-1].token_ids).decode()
    assert sent == "<|system|>be brief\n<|user|>hi\n<|assistant|>"


async def test_chat_stream_with_usage(client):
    stream = await client.chat.completions.create(
        model="tiny",
        messages=user("hi"),
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = await client.chat.completions.create(
        model="tiny", messages=user("hi"), temperature=0, max_tokens=6
    )
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}


async def test_stream_is_server_sent_events_that_end_with_done(url):
    body = {"model": "tiny", "prompt": "a", "temperature": 0, "max_tokens": 3, "stream": True}
    async with httpx.AsyncClient() as http:
        response = await http.post(f"{url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "bcd"
    assert "usage" not in chunks[-1]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["bcd"]),
        (["a", "k"], ["bcd", "lmn"]),
        ([97], ["bcd"]),
        ([[97], [107, 97]], ["bcd", "bcd"]),
    ],
)
async def test_completion_prompts(client, prompt, texts):
    answer = await client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=3)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


async def test_default_length_of_completions_is_openai_s(client):
    answer = await client.completions.create(model="tiny", prompt="a", temperature=0)
    assert answer.usage.completion_tokens == 16


async def test_n_samples_have_their_own_seeds(client):
    request = {"model": "tiny", "prompt": "a", "temperature": 1, "max_tokens": 8, "n": 3, "seed": 5}
    first = await client.completions.create(**request)
    again = await client.completions.create(**request)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3 and texts == [choice.text for choice in again.choices]
    alone = await client.completions.create(**request | {"n": 1})
    assert alone.choices[0].text == texts[0]
    assert first.usage.prompt_tokens == 1 and first.usage.completion_tokens == 24


async def test_n_streams_are_told_apart(client):
    request = {"model": "tiny", "prompt": "a", "temperature": 1, "max_tokens": 8, "n": 3, "seed": 5}
    whole = await client.completions.create(**request)
    texts = ["", "", ""]
    async for chunk in await client.completions.create(stream=True, **request):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_stop_strings_and_ids(client):
    answer = await client.completions.create(
        model="tiny", prompt="a", temperature=0, max_tokens=20, stop=["hij", "zz"]
    )
    assert answer.choices[0].text == "bcdefg" and answer.choices[0].finish_reason == "stop"
    answer = await client.completions.create(
        model="tiny", prompt="a", temperature=0, max_tokens=20, extra_body={"stop_token_ids": [ord("f")]}
    )
    assert answer.choices[0].text == "bcde" and answer.choices[0].finish_reason == "stop"


async def test_sampling_parameters_reach_the_engine(client, fake_engine):
    await client.completions.create(
        model="tiny", prompt="a", temperature=0.7, top_p=0.9, seed=11, max_tokens=1, extra_body={"top_k": 5}
    )
    request = fake_engine._engine.requests[-1]
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.7, 0.9, 5, 11)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels(client, fake_engine, stream):
    request = {"model": "tiny", "prompt": "a", "max_tokens": 500, "n": 2}
    if stream:
        chunks = await client.completions.create(stream=True, **request)
        await anext(aiter(chunks))
        await chunks.close()
    else:
        task = asyncio.create_task(client.completions.create(**request))
        await until(lambda: fake_engine.metrics().running == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: fake_engine.metrics().running == 0)
    assert fake_engine._engine.finished == ["cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, None),
        ({"logprobs": 21}, "logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, None),
        ({"logit_bias": {"300": 1}}, None),
        ({"allowed_token_ids": [300]}, None),
        ({"bad_words": [""]}, None),
        ({"min_tokens": -1}, "min_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"colour": "red"}, "colour"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999]}, None),
        ({"prompt": "x" * 600}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_completion_requests(url, fake_engine, more, param):
    async with httpx.AsyncClient() as http:
        response = await http.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"} | more)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and "\n" not in error["message"]
    assert not fake_engine._engine.requests


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "--session-len"),
    ],
)
async def test_bad_chat_requests(url, more, word):
    body = {"model": "tiny", "messages": user("hi")} | more
    async with httpx.AsyncClient() as http:
        response = await http.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400 and word in response.json()["error"]["message"]


async def test_parameters_at_their_defaults_are_accepted(client):
    await client.chat.completions.create(
        model="tiny",
        messages=user("hi"),
        max_tokens=1,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        logprobs=False,
        response_format={"type": "text"},
        user="me",
    )


async def test_other_errors_have_the_openai_shape(url, client):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="gpt", prompt="a")
    assert caught.value.code == "model_not_found"
    async with httpx.AsyncClient() as http:
        for response, status in (
            (await http.post(f"{url}/v1/completions", content=b"{not json"), 400),
            (await http.post(f"{url}/v1/completions", json={"prompt": "a"}), 400),
            (await http.get(f"{url}/v1/nothing"), 404),
            (await http.get(f"{url}/v1/completions"), 405),
        ):
            assert response.status_code == status and response.json()["error"]["message"]


async def test_engine_failure_is_500_and_in_a_stream_an_event(client, fake_engine):
    fake_engine._engine.fail_next = "broken"
    with pytest.raises(openai.InternalServerError, match="broken"):
        await client.completions.create(model="tiny", prompt="a")
    fake_engine._engine.fail_next = "broken"
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="broken"):
        [chunk async for chunk in stream]


async def test_api_keys(fake_engine):
    with serving(fake_engine, api_keys=["one", "two"]) as url:
        for key in ("one", "two"):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="three") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/v1/models")).status_code == 401
            assert (await http.get(f"{url}/health")).status_code == 200


async def test_health_says_which_engine_and_whether_it_lives(url, fake_engine):
    async with httpx.AsyncClient() as http:
        response = await http.get(f"{url}/health")
        assert response.status_code == 200
        body = response.json()
        assert body == {
            "status": "ok",
            "model": "tiny",
            "engine": "turbomind",
            "backend": "cpu",
            "reason": "created directly",
            "kv_cache": "float16",
        }
        fake_engine.close()
        assert (await http.get(f"{url}/health")).status_code == 503


async def test_health_tells_a_hung_engine_from_a_busy_and_a_paused_one(fake_engine):
    with serving(fake_engine, hang_timeout=60) as url:
        async with httpx.AsyncClient() as http:
            core = fake_engine._engine
            for stalled, paused, code, status in (
                (59, False, 200, "ok"),
                (61, False, 503, "hung"),
                (0, True, 200, "paused"),
                (61, True, 503, "hung"),
            ):
                core.stalled_seconds, core.paused = stalled, paused
                response = await http.get(f"{url}/health")
                assert (response.status_code, response.json()["status"]) == (code, status)
                assert (
                    f"turbomill_engine_stalled_seconds {float(stalled)}"
                    in (await http.get(f"{url}/metrics")).text
                )
            core.paused = False


async def test_control_routes(fake_engine, monkeypatch):
    with serving(fake_engine, api_keys=["key"]) as url:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer key"}) as http:
            for route, sleeping in (
                ("pause", True),
                ("resume", False),
                ("sleep?level=2", True),
                ("wake_up", False),
                ("sleep", True),
                ("wakeup", False),
            ):
                assert (await http.post(f"{url}/{route}")).status_code == 200
                assert (await http.get(f"{url}/is_sleeping")).json() == {"is_sleeping": sleeping}
            assert (await http.post(f"{url}/sleep?level=7")).status_code == 400
            updated: list[str] = []
            monkeypatch.setattr(fake_engine, "update_params", updated.append)
            answer = await http.post(f"{url}/update_weights", params={"model": "/a/store"})
            assert (answer.status_code, answer.json()) == (200, {"updated": "/a/store"})
            assert updated == ["/a/store"]
        assert fake_engine._engine.calls == [
            ("pause",),
            ("resume",),
            ("sleep", 2),
            ("wake",),
            ("sleep", 1),
            ("wake",),
        ]
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{url}/sleep")).status_code == 401


async def test_metrics(url, client):
    await client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=5)
    async with httpx.AsyncClient() as http:
        response = await http.get(f"{url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if line[0] != "#")
    values = {name: float(value) for name, value in samples.items()}
    assert values['turbomill_requests_total{finish_reason="length",model_name="tiny"}'] == 1
    assert values['turbomill_prompt_tokens_total{model_name="tiny"}'] == 3
    assert values['turbomill_generated_tokens_total{model_name="tiny"}'] == 5
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert values[f'turbomill_{name}_seconds_count{{model_name="tiny"}}'] == 1
    assert values["turbomill_requests_running"] == values["turbomill_requests_waiting"] == 0
    assert values['turbomill_cache_blocks{state="free"}'] > 0
    assert values["turbomill_engine_healthy"] == 1


async def test_shutdown_while_a_client_waits(fake_engine):
    with serving(fake_engine) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            task = asyncio.create_task(client.completions.create(model="tiny", prompt="a", max_tokens=400))
            await until(lambda: fake_engine.metrics().running == 1)
            fake_engine.close()
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await task
