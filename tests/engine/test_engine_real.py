"""The native engine, nothing doubled: store, engine, pipeline, server, terminal; the openai SDK as client."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import openai
import pytest
from server_thread import serving

from turbomill import EngineConfig, GenerationConfig, pipeline
from turbomill.engine.pipeline import Pipeline
from turbomill.engine.pytorch.engine import PytorchEngine
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine

pytest.importorskip("turbomill._core")

RUN = [sys.executable, "-m", "turbomill"]
CONFIG = EngineConfig(session_len=512, max_batch_size=8, num_threads=2)


@pytest.fixture(scope="module")
def demo_store():
    return open_model("demo")


@pytest.fixture(scope="module")
def demo_engine(demo_store):
    with TurbomindEngine(demo_store, CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(demo_engine):
    with serving(demo_engine, "demo") as url:
        yield url


@pytest.fixture
async def client(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def reference(checkpoint):
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def test_tiny_model_says_what_transformers_says(tiny_checkpoint, tiny_store):
    import torch

    model = reference(tiny_checkpoint)
    prompts = [list(range(start, start + 20)) for start in (10, 60, 100)]
    with pipeline(tiny_store, EngineConfig(session_len=128, max_batch_size=4, num_threads=2)) as pipe:
        responses = pipe(prompts, GenerationConfig(max_new_tokens=20))
        logits = asyncio.run(pipe.engine.logits(prompts[0]))
    with torch.inference_mode():
        expected = model(torch.tensor([prompts[0]])).logits[0].numpy()
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=256)
            text = out[0, len(prompt) :].tolist()
            assert list(response.token_ids) == [token for token in text if token != 256]
    np.testing.assert_allclose(logits, expected, atol=2e-3, rtol=0)


def test_kv_quantization_runs_and_stays_close(tiny_store):
    prompt = list(range(40, 100))
    logits = {}
    for policy in (0, 8, 4):
        config = EngineConfig(session_len=128, max_batch_size=2, num_threads=2, quant_policy=policy)
        with TurbomindEngine(tiny_store, config) as engine:
            logits[policy] = asyncio.run(engine.logits(prompt))
    errors = {policy: np.abs(logits[policy] - logits[0]).mean() for policy in (8, 4)}
    assert 0 < errors[8] < errors[4] < np.abs(logits[0]).mean()


def test_tiny_pool_is_refused_with_bytes(tiny_store):
    from turbomill.errors import UsageError

    with pytest.raises(UsageError, match=r"needs .*KiB \(8 blocks\), but .* 2 blocks"):
        TurbomindEngine(tiny_store, EngineConfig(session_len=512, cache_max_entry_count=2))


@pytest.mark.parametrize("made", [TurbomindEngine, PytorchEngine])
async def test_storm_of_clients_that_leave(tiny_store, made):
    """Random lengths, cancels and disconnects on a small pool: nothing leaks, texts are right."""
    import random

    rng = random.Random(0)
    threads = 2 if made is TurbomindEngine else 1
    config = EngineConfig(session_len=128, max_batch_size=6, cache_max_entry_count=5, num_threads=threads)
    with made(tiny_store, config) as engine, serving(engine) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            expected: dict[int, set[str]] = {}

            async def one(patience):
                letter = rng.randrange(65, 75)
                request = {"model": "tiny", "prompt": [letter] * 9, "temperature": 0}
                request |= {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
                text = ""
                async for chunk in await client.completions.create(stream=True, **request):
                    text += chunk.choices[0].text
                    patience -= 1
                    if patience == 0:
                        return
                expected.setdefault(letter, set()).add(text)

            await asyncio.gather(*[one(rng.choice([1, 5, 20, 1000])) for _ in range(60)])
        assert expected and all(len(texts) == 1 for texts in expected.values())
        end = time.monotonic() + 10
        while engine.metrics().running or engine.metrics().waiting:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert engine.metrics().free_blocks + engine.metrics().cached_blocks == engine.metrics().total_blocks


@pytest.mark.demo_model
async def test_demo_knows_the_capital_of_france(client):
    answer = await client.chat.completions.create(
        model="demo", messages=user("What is the capital of France?"), temperature=0, max_tokens=32
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.demo_model
async def test_demo_stream_equals_the_whole(client):
    request = {"model": "demo", "messages": user("Name three colours."), "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**request)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **request
        )
    ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    details = {"prompt_tokens_details"}
    assert chunks[-1].usage.model_dump(exclude=details) == whole.usage.model_dump(exclude=details)
    # The second time the prompt is in the prefix cache, all but its last token, or whole blocks of it.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert len(chunks) > 5, "nothing was streamed"


@pytest.mark.demo_model
async def test_demo_completion_with_stop(client):
    answer = await client.completions.create(
        model="demo", prompt="One, two, three, four, five,", temperature=0, max_tokens=40, stop="eight"
    )
    assert answer.choices[0].finish_reason == "stop" and "eight" not in answer.choices[0].text
    assert "seven" in answer.choices[0].text


@pytest.mark.demo_model
async def test_demo_seeds(client):
    async def ask(seed):
        answer = await client.completions.create(
            model="demo", prompt="Once upon a time", temperature=1, seed=seed, max_tokens=12
        )
        return answer.choices[0].text

    alone = await ask(1)
    texts = await asyncio.gather(*[ask(seed) for seed in (1, 2, 1, 3)])
    assert texts[0] == texts[2] == alone
    assert len(set(texts)) == 3


@pytest.mark.demo_model
@pytest.mark.parametrize("stream", [False, True])
async def test_demo_disconnect_cancels(url, client, demo_engine, stream):
    request = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400}
    request["extra_body"] = {"ignore_eos": True}
    if stream:
        chunks = await client.completions.create(stream=True, **request)
        await anext(aiter(chunks))
        await chunks.close()
    else:
        task = asyncio.create_task(client.completions.create(**request))
        while not demo_engine.metrics().running:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    before = demo_engine.metrics().generated_tokens
    end = time.monotonic() + 10
    async with httpx.AsyncClient() as http:
        while True:
            text = (await http.get(f"{url}/metrics")).text
            if "turbomill_requests_running 0.0" in text:
                break
            assert time.monotonic() < end, "still running after the disconnect"
            await asyncio.sleep(0.01)
    assert 'turbomill_requests_total{finish_reason="cancelled",model_name="demo"}' in text
    assert demo_engine.metrics().generated_tokens - before < 200


@pytest.mark.demo_model
async def test_demo_prompt_too_long(client):
    with pytest.raises(openai.BadRequestError, match="--session-len"):
        await client.chat.completions.create(model="demo", messages=user("word " * 600))


@pytest.mark.demo_model
def test_demo_pipeline(demo_engine):
    # The engine is the module's: it is not closed here.
    pipe = Pipeline(demo_engine)
    pieces = list(pipe.stream_infer("Say hello.", GenerationConfig(max_new_tokens=10)))
    whole = pipe("Say hello.", GenerationConfig(max_new_tokens=10))
    assert "".join(piece.text for piece in pieces) == whole.text and whole.text.strip()


def run_turbomill(arguments, **options):
    return subprocess.run(
        [*RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.demo_model
async def test_demo_answers_in_the_form_that_was_asked_for(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model="demo",
        messages=user("Which city is the capital of France?"),
        temperature=0,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    assert answer.choices[0].finish_reason == "stop"
    said = json.loads(answer.choices[0].message.content)
    assert set(said) == {"city", "capital"} and type(said["capital"]) is bool and len(said["city"]) <= 12
    chosen = await client.completions.create(
        model="demo",
        prompt="The capital of France is",
        temperature=0,
        extra_body={"guided_choice": [" Berlin", " Paris", " Rome"]},
    )
    assert chosen.choices[0].text == " Paris"


@pytest.mark.demo_model
def test_demo_chat_through_a_pipe(demo_store):
    arguments = ["chat", "demo", "--temperature", "0", "--session-len", "512", "--max-new-tokens", "24"]
    asked = "What is the capital of France?\nAnd which country is it in?\nexit\n"
    result = run_turbomill(arguments, input=asked)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "France" in result.stdout
    assert "engine turbomind on cpu" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.demo_model
def test_demo_server_process(demo_store):
    arguments = ["serve", "api_server", str(demo_store.path), "--server-port", "0", "--model-name", "smol"]
    with subprocess.Popen(
        [*RUN, *arguments, "--session-len", "256"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"smol is ready at (http://\S+/v1)", line):
                break
        else:
            pytest.fail("".join(lines))
        with openai.OpenAI(base_url=match[1], api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["smol"]
            answer = client.completions.create(model="smol", prompt="1 2 3", max_tokens=2)
            assert answer.usage is not None and answer.usage.completion_tokens <= 2
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(20) == 0, rest
        assert "Traceback" not in rest
