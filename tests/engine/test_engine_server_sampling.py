"""Rules for tokens, log probabilities and echo in the OpenAI protocol, over the double."""

import openai
import pytest
from server_thread import serving


@pytest.fixture
async def client(fake_engine):
    with serving(fake_engine) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


def user(text):
    return [{"role": "user", "content": text}]


async def test_rules_reach_the_engine(client, fake_engine):
    await client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=1,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        logit_bias={"98": -100, "99": 1.5},
        extra_body={
            "repetition_penalty": 1.25,
            "min_p": 0.125,
            "min_tokens": 1,
            "bad_words": ["no"],
            "allowed_token_ids": [97, 98],
            "priority": -3,
        },
    )
    request = fake_engine._engine.requests[-1]
    assert (request.frequency_penalty, request.presence_penalty) == (0.5, -0.25)
    assert (request.logit_bias_ids, request.logit_biases) == ([98, 99], [-100.0, 1.5])
    assert (request.repetition_penalty, request.min_p, request.min_new_tokens) == (1.25, 0.125, 1)
    assert request.bad_words == [list(b"no"), list(b" no")]
    assert (request.allowed_token_ids, request.priority) == ([97, 98], -3)
    assert (request.logprobs, request.prompt_logprobs) == (-1, -1)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client, stream):
    request = {"model": "tiny", "messages": user("hi"), "max_tokens": 4, "temperature": 0}
    request |= {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = await client.chat.completions.create(**request)
    if stream:
        chunks = [chunk async for chunk in answer]
        content = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        content, text = answer.choices[0].logprobs.content, answer.choices[0].message.content
    assert "".join(t.token for t in content) == text and len(content) == 4
    for t in content:
        assert (t.logprob, t.bytes) == (-0.5, list(t.token.encode()))
        assert [(x.token, x.logprob) for x in t.top_logprobs] == [
            (t.token, -0.5),
            (chr(ord(t.token) + 1), -1.5),
        ]


async def test_chat_logprobs_without_alternatives(client):
    answer = await client.chat.completions.create(
        model="tiny", messages=user("hi"), max_tokens=2, logprobs=True
    )
    assert [t.top_logprobs for t in answer.choices[0].logprobs.content] == [[], []]
    plain = await client.chat.completions.create(model="tiny", messages=user("hi"), max_tokens=2)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_and_echo(client, stream):
    request = {"model": "tiny", "prompt": ["xa", "bk"], "temperature": 0, "max_tokens": 3, "stream": stream}
    answer = await client.completions.create(logprobs=1, echo=True, **request)
    parts = [[], []]
    for chunk in [c async for c in answer] if stream else [answer]:
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    for pieces, text in zip(parts, ("xabcd", "bklmn"), strict=True):
        assert "".join(piece.text for piece in pieces) == text
        logprobs = [piece.logprobs for piece in pieces]
        assert [t for part in logprobs for t in part.tokens] == list(text)
        assert [o for part in logprobs for o in part.text_offset] == [0, 1, 2, 3, 4]
        # Nothing precedes the first token.
        assert [v for part in logprobs for v in part.token_logprobs] == [None, -0.5, -0.5, -0.5, -0.5]
        tops = [t for part in logprobs for t in part.top_logprobs]
        assert tops[0] is None and tops[1:] == [{letter: -0.5} for letter in text[1:]]


async def test_completion_logprobs_without_echo(client):
    answer = await client.completions.create(
        model="tiny", prompt="a", temperature=0, max_tokens=2, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["b", "c"] and logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs == [{"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}]
    echoed = await client.completions.create(
        model="tiny", prompt=[120, 97], temperature=0, max_tokens=2, echo=True
    )
    assert echoed.choices[0].text == "xabc" and echoed.choices[0].logprobs is None
