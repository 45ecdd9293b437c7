"""The pipeline over the double."""

import time
from dataclasses import replace

import pytest

from turbomill import EngineConfig, GenerationConfig, pipeline
from turbomill.engine.pipeline import Pipeline
from turbomill.engine.requests import EngineError, PromptError

GREEDY = GenerationConfig(max_new_tokens=3)


@pytest.fixture
def pipe(fake_engine):
    with Pipeline(fake_engine) as pipe:
        yield pipe


def sent(pipe):
    return [bytes(request.token_ids).decode() for request in pipe.engine._engine.requests]


def test_one_text_is_one_user_message(pipe):
    response = pipe("hi", GREEDY)
    assert sent(pipe) == ["<|user|>hi\n<|assistant|>"]
    assert response.input_token_len == len(sent(pipe)[0]) and response.generate_token_len == 3
    assert response.finish_reason == "length" and len(response.token_ids) == 3 == len(response.text)


def test_without_preprocessing_the_text_is_the_prompt(pipe):
    assert pipe("a", GREEDY, do_preprocess=False).text == "bcd"


def test_token_ids_and_messages(pipe):
    assert pipe([97], GREEDY).text == "bcd"
    pipe([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], GREEDY)
    assert sent(pipe)[-1] == "<|system|>s\n<|user|>u\n<|assistant|>"


def test_batches_keep_their_order(pipe):
    responses = pipe(["a", "k", "x"], GREEDY, do_preprocess=False)
    assert [response.text for response in responses] == ["bcd", "lmn", "yza"]
    assert [response.index for response in responses] == [0, 1, 2]
    assert [r.text for r in pipe([[97], [107]], GREEDY)] == ["bcd", "lmn"]
    conversations = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    assert len(pipe(conversations, GREEDY)) == 2
    assert pipe([], GREEDY) == []


def test_one_configuration_for_each_prompt(pipe):
    configs = [GenerationConfig(max_new_tokens=n) for n in (1, 4)]
    responses = pipe(["a", "a"], configs, do_preprocess=False)
    assert [response.text for response in responses] == ["b", "bcde"]
    with pytest.raises(ValueError, match="shorter"):
        pipe(["a", "a"], configs[:1])


def test_a_bad_prompt_stops_the_batch_before_it_begins(pipe):
    with pytest.raises(PromptError):
        pipe(["a", "x" * 600], GREEDY)
    assert sent(pipe) == []


def test_a_failure_is_raised_alone_and_nothing_keeps_running(pipe):
    pipe.engine._engine.fail_next = "broken"
    with pytest.raises(EngineError, match="broken"):
        pipe(["a"] * 5, GenerationConfig(max_new_tokens=400), do_preprocess=False)
    assert sorted(idle(pipe)) == ["cancelled"] * 4 + ["error"]


def idle(pipe):
    end = time.monotonic() + 5
    while pipe.engine.metrics().running:
        assert time.monotonic() < end
        time.sleep(0.01)
    return pipe.engine._engine.finished


def test_streaming(pipe):
    pieces = list(pipe.stream_infer(["a", "k"], GREEDY, do_preprocess=False))
    texts = ["".join(p.text for p in pieces if p.index == i) for i in (0, 1)]
    assert texts == ["bcd", "lmn"]
    assert sum(piece.finish_reason == "length" for piece in pieces) == 2
    assert len(pieces) > 2, "nothing was streamed"


def test_leaving_a_stream_cancels(pipe):
    for _ in pipe.stream_infer("a", GenerationConfig(max_new_tokens=400)):
        break
    assert idle(pipe) == ["cancelled"]


def test_a_stream_raises_what_failed(pipe):
    pipe.engine._engine.fail_next = "broken"
    with pytest.raises(EngineError, match="broken"):
        list(pipe.stream_infer("a", GREEDY))


def test_works_where_an_event_loop_runs_already(pipe):
    import asyncio

    async def notebook_cell():
        return pipe("a", GREEDY, do_preprocess=False).text

    assert asyncio.run(notebook_cell()) == "bcd"


def test_pipeline_opens_the_model_and_closes_twice(fake_core, fake_store):
    pipe = pipeline(fake_store, EngineConfig(session_len=64))
    assert pipe.engine.session_len == 64 and pipe.engine.info.reason == "the default backend"
    pipe.close()
    pipe.close()
    with pytest.raises(EngineError, match="closed"):
        pipe("a")


def test_n_texts_for_one_prompt(pipe):
    gen = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=1.0, seed=5, n=3)
    response = pipe("a", gen, do_preprocess=False)
    texts = [response.text, *(other.text for other in response.others)]
    alone = [pipe("a", replace(gen, n=1, seed=5 + i), do_preprocess=False).text for i in range(3)]
    assert texts == alone and len(set(texts)) == 3
    assert [other.sample for other in response.others] == [1, 2]
    both = pipe(["a", "k"], gen, do_preprocess=False)
    assert [len(one.others) for one in both] == [2, 2] and both[0].text == texts[0]
    pieces = ["", "", ""]
    for piece in pipe.stream_infer("a", gen, do_preprocess=False):
        pieces[piece.sample] += piece.text
    assert pieces == texts


def test_logprobs_and_cached_tokens_are_in_the_response(pipe):
    gen = GenerationConfig(max_new_tokens=3, logprobs=2, prompt_logprobs=1, n=2)
    response = pipe("hello", gen, do_preprocess=False)
    assert [t.token_id for t in response.logprobs] == list(response.token_ids)
    assert [t.token_id for t in response.prompt_logprobs] == list(b"ello")
    assert response.logprobs[0].top[0] == (response.token_ids[0], -0.5)
    assert response.cached_token_len == 3
    assert response.others[0].prompt_logprobs == () and len(response.others[0].logprobs) == 3
