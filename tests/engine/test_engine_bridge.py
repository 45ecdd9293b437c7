"""TurbomindEngine over the double: threads, loops, cancellation, failures."""

import asyncio
import threading
import time

import numpy as np
import pytest

from turbomill.engine.config import GenerationConfig
from turbomill.engine.requests import EngineError, PromptError
from turbomill.errors import UsageError


async def collect(stream):
    return [output async for output in stream]


def core_of(engine):
    return engine._engine


def wait_until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


async def test_text_usage_and_finish(fake_engine):
    outputs = await collect(fake_engine.generate("abc", GenerationConfig(max_new_tokens=5)))
    assert "".join(o.text for o in outputs) == "defgh"
    assert [t for o in outputs for t in o.token_ids] == list(b"defgh")
    assert outputs[-1].finish_reason == "length" and all(o.finish_reason is None for o in outputs[:-1])
    assert (outputs[-1].usage.prompt_tokens, outputs[-1].usage.generated_tokens) == (3, 5)


async def test_request_has_what_the_configuration_says(fake_engine):
    gen = GenerationConfig(
        max_new_tokens=3, do_sample=True, temperature=0.5, top_k=7, top_p=0.9, seed=-1, stop_token_ids=[1]
    )
    await collect(fake_engine.generate([97], gen))
    request = core_of(fake_engine).requests[-1]
    assert (request.temperature, request.top_k, request.top_p) == (0.5, 7, 0.9)
    assert request.seed == 2**63 - 1 and request.stop_token_ids == [1, 256]
    await collect(fake_engine.generate([97], GenerationConfig(max_new_tokens=1, ignore_eos=True)))
    request = core_of(fake_engine).requests[-1]
    assert request.temperature == 0 and request.stop_token_ids == []


async def test_no_seed_is_a_new_seed_each_time(fake_engine):
    gen = GenerationConfig(do_sample=True, max_new_tokens=1)
    for _ in range(3):
        await collect(fake_engine.generate("a", gen))
    assert len({request.seed for request in core_of(fake_engine).requests}) == 3


async def test_length_is_limited_by_the_session(make_fake_engine):
    engine = make_fake_engine(session_len=10)
    outputs = await collect(engine.generate("abcdefg"))
    assert outputs[-1].usage.generated_tokens == 3 and outputs[-1].finish_reason == "length"
    with pytest.raises(PromptError) as caught:
        engine.generate("abcdefghij")
    assert "10 tokens" in str(caught.value) and "--session-len" in str(caught.value)
    assert core_of(engine).requests[-1].token_ids == list(b"abcdefg"), "the long prompt was not submitted"


@pytest.mark.parametrize(
    "prompt", ["", [], [257], [-1], [{"role": "robot", "content": "x"}], [{"content": "x"}]]
)
async def test_bad_prompts_are_refused_before_submission(fake_engine, prompt):
    with pytest.raises(PromptError) as caught:
        fake_engine.generate(prompt)
    assert "\n" not in str(caught.value) and not core_of(fake_engine).requests


async def test_messages_go_through_the_template(fake_engine):
    ids = fake_engine.encode([{"role": "user", "content": "hé"}])
    assert bytes(ids).decode() == "<|user|>hé\n<|assistant|>"


async def test_stop_string_cancels_the_request(fake_engine):
    gen = GenerationConfig(max_new_tokens=500, stop_words=["hij"])
    outputs = await collect(fake_engine.generate("a", gen))
    assert "".join(o.text for o in outputs) == "bcdefg" and outputs[-1].finish_reason == "stop"
    wait_until(lambda: fake_engine.metrics().running == 0)


async def test_closing_the_iterator_cancels(fake_engine):
    stream = fake_engine.generate("a", GenerationConfig(max_new_tokens=500))
    await anext(stream)
    assert fake_engine.metrics().running == 1
    await stream.aclose()
    wait_until(lambda: fake_engine.metrics().running == 0)
    assert not fake_engine._bridge._streams


async def test_cancelling_the_task_cancels(make_fake_engine):
    engine = make_fake_engine(max_batch_size=1)
    gen = GenerationConfig(max_new_tokens=500)
    tasks = [asyncio.create_task(collect(engine.generate("a", gen))) for _ in range(3)]
    while engine.metrics().running + engine.metrics().waiting < 3:
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    wait_until(lambda: engine.metrics().running + engine.metrics().waiting == 0)


async def test_a_generator_that_is_never_iterated_costs_nothing(fake_engine):
    await fake_engine.generate("a").aclose()
    assert not core_of(fake_engine).requests


async def test_engine_failure_is_raised_and_alone(fake_engine):
    core_of(fake_engine).fail_next = "out of blocks"
    with pytest.raises(EngineError, match="out of blocks"):
        await collect(fake_engine.generate("a", GenerationConfig(max_new_tokens=3)))
    outputs = await collect(fake_engine.generate("a", GenerationConfig(max_new_tokens=3)))
    assert outputs[-1].finish_reason == "length"


async def test_request_that_can_never_run_is_a_prompt_error(make_fake_engine):
    engine = make_fake_engine(session_len=512, cache_max_entry_count=8, max_batch_size=1)
    core_of(engine).config.cache_block_count = 1
    with pytest.raises(PromptError, match="needs 3 blocks"):
        await collect(engine.generate([97] * 150))


async def test_many_requests_in_one_loop(make_fake_engine):
    engine = make_fake_engine(max_batch_size=16)
    gen = GenerationConfig(max_new_tokens=20)
    results = await asyncio.gather(*[collect(engine.generate([97 + i % 26], gen)) for i in range(100)])
    for i, outputs in enumerate(results):
        expected = [97 + (i + 1 + k) % 26 for k in range(20)]
        assert [t for o in outputs for t in o.token_ids] == expected


def test_many_event_loops_at_once(fake_engine):
    texts = {}

    def client(letter):
        async def run():
            gen = GenerationConfig(max_new_tokens=10)
            results = await asyncio.gather(*[collect(fake_engine.generate(letter, gen)) for _ in range(5)])
            texts[letter] = {"".join(o.text for o in outputs) for outputs in results}

        asyncio.run(run())

    threads = [threading.Thread(target=client, args=(letter,)) for letter in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts == {letter: {alphabet[i + 1 : i + 11]} for i, letter in enumerate("abcdef")}


def test_loop_closed_with_a_request_running(fake_engine, caplog):
    loop = asyncio.new_event_loop()
    stream = fake_engine.generate("a", GenerationConfig(max_new_tokens=400))
    loop.run_until_complete(anext(stream))
    loop.close()
    wait_until(lambda: fake_engine.metrics().running == 0)
    assert "event loop was closed" in caplog.text
    with pytest.raises(StopIteration):  # what asyncio would do, had the loop been closed properly
        stream.aclose().send(None)


async def test_close_ends_running_requests_and_is_idempotent(fake_engine):
    task = asyncio.create_task(collect(fake_engine.generate("a", GenerationConfig(max_new_tokens=500))))
    while fake_engine.metrics().running == 0:
        await asyncio.sleep(0.005)
    fake_engine.close()
    fake_engine.close()
    outputs = await task
    assert outputs[-1].finish_reason == "cancelled"
    with pytest.raises(EngineError, match="closed"):
        await collect(fake_engine.generate("a"))
    assert not fake_engine.metrics().healthy


async def test_logits_in_chunks(make_fake_engine):
    engine = make_fake_engine(max_prefill_token_num=7)
    logits = await engine.logits(list(b"abcdefghijklmnopqrstuvwxyz"))
    assert logits.shape == (26, 257) and logits.dtype == np.float32
    assert bytes(logits.argmax(1).tolist()) == b"bcdefghijklmnopqrstuvwxyza"
    with pytest.raises(PromptError, match="513 tokens"):
        await engine.logits([97] * 513)


def test_configuration_reaches_the_core(make_fake_engine, caplog):
    caplog.set_level("INFO", "turbomill.engine")
    engine = make_fake_engine(session_len=128, max_batch_size=3, quant_policy=4, num_threads=2)
    config = core_of(engine).config
    assert (config.session_len, config.max_batch_size, config.quant_policy) == (128, 3, 4)
    assert config.cache_block_count == 3 * 2 + 8 and config.cache_dtype == "float16"
    assert core_of(engine).tensors[0].fields[:3] == ("embed", "dense.nk", "float16")
    assert "engine turbomind on cpu" in caplog.text
    with pytest.raises(UsageError, match="session_len is 513, expected at most the model's context of 512"):
        make_fake_engine(session_len=513)


async def test_without_tokenizer_token_ids_run(make_fake_engine, fake_store):
    fake_store.manifest["tokenizer"]["files"] = []
    engine = make_fake_engine()
    outputs = await collect(engine.generate([97], GenerationConfig(max_new_tokens=3)))
    assert [t for o in outputs for t in o.token_ids] == [98, 99, 100]
    with pytest.raises(PromptError, match="no tokenizer"):
        engine.generate("text")
