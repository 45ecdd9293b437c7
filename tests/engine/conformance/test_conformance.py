"""What every engine does, seen through the async interface of turbomill.engine.base alone."""

import asyncio
import time

import numpy as np
import pytest

from turbomill.engine.config import GenerationConfig
from turbomill.engine.requests import EngineError, PromptError
from turbomill.errors import UsageError

PROMPT = list(b"The quick brown fox jumps over the lazy dog")


async def run(engine, prompt, **gen):
    gen.setdefault("ignore_eos", True)
    outputs = [output async for output in engine.generate(prompt, GenerationConfig(**gen))]
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, "".join(output.text for output in outputs), outputs[-1]


async def idle(engine):
    end = time.monotonic() + 10
    while engine.metrics().running or engine.metrics().waiting:
        assert time.monotonic() < end, "requests are still there"
        await asyncio.sleep(0.01)


async def begun(engine, task):
    """Return when the task's request runs, or, where this was looked for too late, has run."""
    while not (engine.metrics().running or task.done()):
        await asyncio.sleep(0.001)


async def test_stream_is_in_order_and_adds_up(engine):
    outputs = [o async for o in engine.generate(PROMPT, GenerationConfig(max_new_tokens=24, ignore_eos=True))]
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(tokens) == 24
    assert "".join(o.text for o in outputs) == engine.decode(tokens)
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
    counts = [o.usage.generated_tokens for o in outputs]
    assert counts == list(np.cumsum([len(o.token_ids) for o in outputs]))
    assert {o.usage.prompt_tokens for o in outputs} == {len(PROMPT)}


async def test_greedy_is_the_argmax_of_the_logits(engine):
    tokens, _, _ = await run(engine, PROMPT, max_new_tokens=12)
    logits = await engine.logits(PROMPT + tokens)
    assert logits.shape[0] == len(PROMPT) + 12 and logits.dtype == np.float32
    assert np.isfinite(logits).all()
    assert logits.argmax(1)[len(PROMPT) - 1 : -1].tolist() == tokens


async def test_logits_do_not_depend_on_chunks(make_engine):
    whole = await make_engine().logits(PROMPT)
    chunked = await make_engine(max_prefill_token_num=8).logits(PROMPT)
    np.testing.assert_allclose(chunked, whole, atol=2e-3, rtol=0)


async def test_many_concurrent_requests_give_what_each_gives_alone(engine):
    prompts = [PROMPT[i % 20 : i % 20 + 5 + i % 17] for i in range(40)]
    alone = [await run(engine, prompt, max_new_tokens=10) for prompt in prompts]
    together = await asyncio.gather(*[run(engine, prompt, max_new_tokens=10) for prompt in prompts])
    assert [t[0] for t in together] == [a[0] for a in alone]


async def test_small_pool_still_serves_everyone(make_engine):
    engine = make_engine(session_len=128, cache_max_entry_count=4)
    alone, _, _ = await run(engine, PROMPT, max_new_tokens=80)
    together = await asyncio.gather(*[run(engine, PROMPT, max_new_tokens=80) for _ in range(8)])
    assert all(tokens == alone for tokens, _, _ in together)
    await idle(engine)


async def test_guided_texts_fit_their_grammar_beside_free_ones(engine):
    pytest.importorskip("llguidance")  # not on every machine with a GPU
    digits = {"type": "regex_schema", "regex_schema": "[0-9]{3,12}"}
    gen = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 20, "ignore_eos": False}
    runs = [run(engine, PROMPT, seed=i, response_format=digits if i % 2 else None, **gen) for i in range(8)]
    texts = [(text, last.finish_reason) for _, text, last in await asyncio.gather(*runs)]
    assert all(text.isdigit() and 3 <= len(text) <= 12 and why == "stop" for text, why in texts[1::2])
    assert not any(text.isdigit() for text, _ in texts[::2])
    with pytest.raises(PromptError, match="regex"):
        engine.generate(PROMPT, GenerationConfig(response_format={**digits, "regex_schema": "[0-9"}))
    await idle(engine)


async def test_same_seed_same_text_whatever_the_batch(engine):
    sampled = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 16}
    alone, _, _ = await run(engine, PROMPT, seed=7, **sampled)
    others = [run(engine, PROMPT[: 5 + i], seed=i, **sampled) for i in range(6)]
    (again, _, _), *_ = await asyncio.gather(run(engine, PROMPT, seed=7, **sampled), *others)
    other, _, _ = await run(engine, PROMPT, seed=8, **sampled)
    assert again == alone != other


async def test_top_k_one_is_greedy(engine):
    greedy, _, _ = await run(engine, PROMPT, max_new_tokens=8)
    sampled, _, _ = await run(engine, PROMPT, max_new_tokens=8, do_sample=True, top_k=1, temperature=2.0)
    assert sampled == greedy


async def test_logprobs_are_the_log_softmax_of_the_logits(engine):
    gen = GenerationConfig(max_new_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    outputs = [output async for output in engine.generate(PROMPT, gen)]
    tokens = [token for output in outputs for token in output.token_ids]
    own = [t for output in outputs for t in output.logprobs]
    prompt = [t for output in outputs for t in output.prompt_logprobs]
    assert [t.token_id for t in prompt + own] == PROMPT[1:] + tokens
    logits = (await engine.logits(PROMPT + tokens)).astype(np.float64)
    exact = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    exact -= logits.max(1, keepdims=True)
    for row, t in zip(exact, prompt + own, strict=False):
        assert t.logprob == pytest.approx(row[t.token_id], abs=2e-3)
        np.testing.assert_allclose([p for _, p in t.top], np.sort(row)[::-1][: len(t.top)], atol=2e-3)
    assert {len(t.top) for t in own} == {3} and {len(t.top) for t in prompt} == {2}


async def test_rules_for_tokens(engine):
    free, _, _ = await run(engine, PROMPT, max_new_tokens=12)
    banned, _, _ = await run(engine, PROMPT, max_new_tokens=12, bad_token_ids=free[:2])
    assert banned[0] != free[0] and not set(free[:2]) & set(banned)
    biased, _, _ = await run(engine, PROMPT, max_new_tokens=12, logit_bias={65: 100})
    assert biased == [65] * 12
    allowed, _, _ = await run(engine, PROMPT, max_new_tokens=40, allowed_token_ids=range(65, 70))
    assert set(allowed) <= set(range(65, 70))
    rules = {"allowed_token_ids": range(65, 105), "frequency_penalty": 100, "max_new_tokens": 40}
    once, _, _ = await run(engine, PROMPT, **rules)
    assert sorted(once) == list(range(65, 105))
    short, _, last = await run(engine, PROMPT, max_new_tokens=12, stop_token_ids=free[:1], min_new_tokens=5)
    assert len(short) >= 5 and last.finish_reason in ("stop", "length")
    text = (await run(engine, PROMPT, max_new_tokens=40, allowed_token_ids=[97, 98], bad_words=["ab"]))[1]
    assert "ab" not in text


async def test_samples_share_the_prompts_blocks(engine):
    samples = GenerationConfig(
        n=4, seed=3, do_sample=True, temperature=1.0, max_new_tokens=8, ignore_eos=True
    ).samples()

    async def sample(gen):
        outputs = [output async for output in engine.generate(PROMPT * 4, gen)]
        return [t for o in outputs for t in o.token_ids], outputs[-1].usage.cached_tokens

    alone = [(await sample(gen))[0] for gen in samples]
    found = await asyncio.gather(*[sample(gen) for gen in samples])
    assert [tokens for tokens, _ in found] == alone
    assert all(cached >= len(PROMPT) * 4 - 64 for _, cached in found)


async def test_prefix_caching_changes_nothing_but_the_work(make_engine):
    plain, sharing = make_engine(enable_prefix_caching=False), make_engine()
    texts = []
    for engine in (plain, sharing, sharing):
        texts.append([await run(engine, PROMPT * 4 + PROMPT[:i], max_new_tokens=12) for i in range(6)])
    assert [t[0] for t in texts[0]] == [t[0] for t in texts[1]] == [t[0] for t in texts[2]]
    assert plain.metrics().cached_tokens == 0
    assert all(last.usage.cached_tokens >= 128 for _, _, last in texts[2])


async def test_stop_token_ends_and_is_not_returned(engine):
    tokens, _, _ = await run(engine, PROMPT, max_new_tokens=20)
    stop = tokens[5]
    first = tokens.index(stop)
    cut, _, last = await run(engine, PROMPT, max_new_tokens=20, stop_token_ids=[stop])
    assert cut == tokens[:first] and last.finish_reason == "stop"


async def test_stop_string_ends_before_it(engine):
    tokens, text, _ = await run(engine, PROMPT, max_new_tokens=30)
    stop = text[6:9]
    cut, cut_text, last = await run(engine, PROMPT, max_new_tokens=200, stop_words=[stop])
    assert cut_text == text[: text.index(stop)] and last.finish_reason == "stop"
    assert cut == tokens[: len(cut)]
    await idle(engine)


async def test_closing_the_stream_frees_its_blocks(engine):
    free = engine.metrics().free_blocks + engine.metrics().cached_blocks
    stream = engine.generate(PROMPT, GenerationConfig(max_new_tokens=200, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    await idle(engine)
    assert engine.metrics().free_blocks + engine.metrics().cached_blocks == free


async def test_cancelling_tasks_running_and_waiting(make_engine):
    engine = make_engine(max_batch_size=2)
    tasks = [asyncio.create_task(run(engine, PROMPT, max_new_tokens=200)) for _ in range(6)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await idle(engine)
    tokens, _, _ = await run(engine, PROMPT, max_new_tokens=3)
    assert len(tokens) == 3


async def test_session_limits(make_engine):
    engine = make_engine(session_len=64)
    tokens, _, last = await run(engine, PROMPT)
    assert len(PROMPT) + len(tokens) == 64 == engine.session_len and last.finish_reason == "length"
    with pytest.raises(PromptError, match="64"):
        engine.generate([1] * 64)
    assert (await engine.logits([1] * 64)).shape[0] == 64
    with pytest.raises(PromptError):
        await engine.logits([1] * 65)


async def test_prompts_are_checked_at_once(engine):
    for bad in ("", [], [10**6], [-1], [{"role": "nobody", "content": ""}]):
        with pytest.raises(PromptError):
            engine.generate(bad)


async def test_messages_equal_their_rendered_text(engine):
    messages = [{"role": "user", "content": "Hello"}]
    ids = engine.encode(messages)
    assert (await run(engine, messages, max_new_tokens=5))[0] == (await run(engine, ids, max_new_tokens=5))[0]


async def test_metrics_count(engine):
    before = engine.metrics()
    await run(engine, PROMPT, max_new_tokens=9)
    await idle(engine)
    after = engine.metrics()
    assert after.healthy and after.steps > before.steps
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
    assert after.generated_tokens - before.generated_tokens == 9
    assert after.free_blocks + after.cached_blocks == after.total_blocks


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_the_blocks_up_and_changes_no_text(engine, level):
    expected, _, _ = await run(engine, PROMPT, max_new_tokens=100)
    task = asyncio.create_task(run(engine, PROMPT, max_new_tokens=100))
    await begun(engine, task)
    await asyncio.to_thread(engine.sleep, level)
    asleep = engine.metrics()
    assert asleep.paused and asleep.free_blocks == asleep.total_blocks
    later = asyncio.create_task(run(engine, PROMPT, max_new_tokens=100))
    await asyncio.sleep(0.05)
    assert engine.metrics().generated_tokens == asleep.generated_tokens
    await asyncio.to_thread(engine.wakeup)
    assert (await task)[0] == (await later)[0] == expected
    with pytest.raises(UsageError, match="level"):
        engine.sleep(3)


async def test_new_weights_take_the_place_of_the_old(engine, tiny_store, other_tiny_store):
    """What ran goes on; nothing that the old weights computed is used again."""
    before, _, _ = await run(engine, PROMPT * 4, max_new_tokens=20)
    task = asyncio.create_task(run(engine, PROMPT, max_new_tokens=150))
    await begun(engine, task)
    await asyncio.to_thread(engine.update_params, other_tiny_store)
    after, _, _ = await run(engine, PROMPT * 4, max_new_tokens=20)
    assert after != before and len((await task)[0]) == 150
    logits = await engine.logits(PROMPT * 4 + after)
    assert logits.argmax(1)[len(PROMPT) * 4 - 1 : -1].tolist() == after
    await asyncio.to_thread(engine.update_params, tiny_store)
    assert (await run(engine, PROMPT * 4, max_new_tokens=20))[0] == before


async def test_pause_and_resume(engine):
    engine.pause()
    task = asyncio.create_task(run(engine, PROMPT, max_new_tokens=5))
    await asyncio.sleep(0.05)
    assert not task.done() and engine.metrics().paused
    engine.resume()
    assert len((await task)[0]) == 5


async def test_close_ends_running_requests(make_engine):
    engine = make_engine()
    task = asyncio.create_task(run(engine, PROMPT, max_new_tokens=200))
    await begun(engine, task)
    engine.close()
    engine.close()
    _, _, last = await asyncio.wait_for(task, 10)
    assert last.finish_reason in ("cancelled", "length")
    with pytest.raises(EngineError):
        await run(engine, PROMPT, max_new_tokens=1)


def test_info_says_which_engine_and_why(engine):
    assert engine.info.name and engine.info.backend and engine.info.reason
