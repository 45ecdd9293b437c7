"""Structured output: whatever a model with random weights would say, the text fits its grammar."""

import asyncio
import json
import re
import time
from dataclasses import replace

import openai
import pytest
from server_thread import serving

from turbomill import EngineConfig, GenerationConfig
from turbomill.engine.grammar import Grammar, parse_response_format
from turbomill.engine.pipeline import Pipeline
from turbomill.engine.requests import EngineError, PromptError
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import UsageError


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "test", "schema": schema}}


def regex(text):
    return {"type": "regex_schema", "regex_schema": text}


SHORT = {"type": "string", "maxLength": 4}
COUNT = {"type": "integer", "minimum": -3, "maximum": 250}
PERSON = {
    "type": "object",
    "properties": {"name": SHORT, "age": COUNT, "tags": {"type": "array", "items": SHORT, "maxItems": 3}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["leaf", "branch", 7, None]},
                "children": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/leaf"},
                    "minItems": 1,
                    "maxItems": 2,
                },
            },
            "required": ["kind", "children"],
            "additionalProperties": False,
        },
        "leaf": {
            "anyOf": [{"const": "x"}, {"type": "boolean"}, {"type": "integer", "minimum": 5, "maximum": 9}]
        },
    },
}


def is_short(value):
    return isinstance(value, str) and len(value) <= 4


def is_count(value):
    return type(value) is int and -3 <= value <= 250


def is_person(value):
    tags = value.get("tags", [])
    return (
        {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        and is_short(value["name"])
        and is_count(value["age"])
        and len(tags) <= 3
        and all(map(is_short, tags))
    )


def is_tree(value):
    return (
        set(value) == {"kind", "children"}
        and value["kind"] in ("leaf", "branch", 7, None)
        and 1 <= len(value["children"]) <= 2
        and all(c == "x" or type(c) is bool or (type(c) is int and 5 <= c <= 9) for c in value["children"])
    )


SCHEMAS = [
    (PERSON, is_person),
    (TREE, is_tree),
    (COUNT, is_count),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, lambda v: re.fullmatch("[A-Z]{2}-[0-9]{3}", v)),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
        lambda v: 2 <= len(v) <= 5,
    ),
]
HOT = GenerationConfig(max_new_tokens=400, do_sample=True, temperature=1.5, top_k=0)
PROMPT = list(b"Write something.")


@pytest.fixture(scope="module")
def pipe(tiny_store):
    pytest.importorskip("turbomill._core")
    config = EngineConfig(session_len=512, max_batch_size=8, num_threads=2, deterministic=True)
    with Pipeline(TurbomindEngine(tiny_store, config)) as pipe:
        yield pipe


@pytest.mark.parametrize(("schema", "fits"), SCHEMAS)
def test_json_fits_its_schema(pipe, schema, fits):
    gens = [replace(HOT, seed=seed, response_format=json_schema(schema)) for seed in range(6)]
    responses = pipe([PROMPT] * 6, gens)
    assert [r.finish_reason for r in responses] == ["stop"] * 6
    assert all(fits(json.loads(r.text)) for r in responses), [r.text for r in responses]
    assert len({r.text for r in responses}) > 1  # the model still has its say
    free = pipe([PROMPT], [replace(HOT, seed=0)])[0]
    with pytest.raises(json.JSONDecodeError):
        json.loads(free.text)


def test_any_json_object(pipe):
    """Strings have no end at random, so only a bias closes them; what is cut off has the finish of one."""
    gen = replace(
        HOT, seed=1, response_format={"type": "json_object"}, logit_bias={ord('"'): 12, ord("}"): 14}
    )
    response = pipe([PROMPT], [gen])[0]
    assert response.finish_reason == "stop" and isinstance(json.loads(response.text), dict)
    cut = pipe([PROMPT], [replace(gen, max_new_tokens=1)])[0]
    assert (cut.text, cut.finish_reason) == ("{", "length")


def test_regex_choice_and_grammar(pipe):
    def said(response_format, **more):
        out = pipe(
            [PROMPT] * 8, [replace(HOT, seed=s, response_format=response_format, **more) for s in range(8)]
        )
        assert {r.finish_reason for r in out} == {"stop"}
        return {r.text for r in out}

    assert all(
        re.fullmatch(r"(19|20)\d\d-[01]\d", text) for text in said(regex(r"^(19|20)[0-9]{2}-[01][0-9]$"))
    )
    choice = {"type": "choice", "choice": ["yes", "no", 'maybe "é"']}
    assert said(choice) <= {"yes", "no", 'maybe "é"'}
    assert said(choice, logit_bias={ord("m"): 50}) == {'maybe "é"'}
    sums = said({"type": "grammar", "grammar": 'start: D ("+" D)?\nD: /[0-9]/'})
    assert all(re.fullmatch(r"\d(\+\d)?", text) for text in sums)
    gbnf = {"type": "grammar", "grammar": 'root ::= "a" | "b" "c"'}
    assert said(gbnf) <= {"a", "bc"} and said(gbnf, logit_bias={ord("b"): 50}) == {"bc"}
    # Where the text may end or go on, the model decides, unless it is not to end.
    assert said(regex("a{1,9}"), logit_bias={256: 50}) == {"a"}
    assert said(regex("a{1,9}"), ignore_eos=True) == {"a" * 9}
    assert said(regex("a{1,9}"), min_new_tokens=4, logit_bias={256: 50}) == {"a" * 4}
    assert said(regex("a+b"), stop_words=("aa",), logit_bias={97: 50}) == {""}


def test_a_batch_of_both_kinds(pipe):
    """Same seed, same text, whatever runs beside it."""
    gens = [
        replace(
            HOT, seed=i, max_new_tokens=60, response_format=json_schema(SCHEMAS[i % 4][0]) if i % 3 else None
        )
        for i in range(9)
    ]
    alone = [pipe([PROMPT], [gen])[0] for gen in gens]
    together = pipe([PROMPT] * 9, gens)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_samples_and_logprobs(pipe):
    gen = replace(HOT, seed=5, n=3, logprobs=2, response_format=json_schema(PERSON))
    first = pipe([PROMPT], [gen])[0]
    texts = [r.text for r in (first, *first.others)]
    assert len(set(texts)) == 3 and all(is_person(json.loads(text)) for text in texts)
    assert texts[1] == pipe([PROMPT], [replace(gen, n=1, seed=6)])[0].text
    assert [p.token_id for p in first.logprobs] == list(first.token_ids)
    assert all(len(p.top) == 2 for p in first.logprobs)


def test_tiny_pools_push_texts_out_and_change_nothing(tiny_store, pipe):
    gens = [replace(HOT, seed=i, max_new_tokens=70, response_format=json_schema(TREE)) for i in range(6)]
    prompts = [PROMPT + [65 + i] * 5 * i for i in range(6)]
    expected = pipe(prompts, gens)
    config = EngineConfig(
        session_len=128, num_threads=2, deterministic=True, cache_max_entry_count=16, cache_block_seq_len=8
    )
    with Pipeline(TurbomindEngine(tiny_store, config)) as tiny:
        got = tiny(prompts, gens)
        metrics = tiny.engine.metrics()
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert metrics.preemptions > 0 and metrics.running == 0


def test_leaving_a_text_cancels_it(pipe):
    gen = replace(HOT, seed=2, response_format=regex("[a-z]{400}"))
    pieces = pipe.stream_infer([PROMPT], gen)
    assert "".join(next(pieces).text for _ in range(3)).islower()
    pieces.close()
    ended = time.monotonic() + 20
    while pipe.engine.metrics().running and time.monotonic() < ended:
        time.sleep(0.01)
    assert pipe.engine.metrics().running == 0
    assert pipe([PROMPT], replace(gen, response_format=regex("[0-9]{5}")))[0].text.isdigit()


BAD = [
    (json_schema({"type": "nonsense"}), "the JSON schema cannot be followed: Invalid type: nonsense"),
    (json_schema({"not": {}}), "not"),
    (json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (json_schema({"$ref": "#/$defs/x"}), "/$defs/x"),
    (regex("[a"), "the regex cannot be followed: unclosed character class"),
    (regex("(?=a)b"), "look-around"),
    (regex(r"[^\s\S]"), "no token may come after 0 tokens"),
    ({"type": "grammar", "grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"type": "grammar", "grammar": "root ::= foo"}, "foo"),
]


@pytest.mark.parametrize(("response_format", "words"), BAD)
def test_a_grammar_that_cannot_be_is_refused_before_anything_runs(fake_engine, response_format, words):
    with pytest.raises(PromptError) as caught:
        fake_engine.generate("hi", GenerationConfig(response_format=response_format))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not fake_engine._engine.requests


def test_a_grammar_without_a_tokenizer(make_fake_engine, fake_store):
    fake_store.manifest["tokenizer"]["files"] = []
    with pytest.raises(PromptError, match="no tokenizer"):
        make_fake_engine().generate([1], GenerationConfig(response_format=regex("a")))


def test_a_dead_end_in_the_middle_ends_its_own_text(pipe):
    dead = {"type": "grammar", "grammar": 'start: "ab" NOTHING\nNOTHING: /[^\\s\\S]/'}
    with pytest.raises(EngineError, match="the grammar cannot be followed: no token may come after 2 tokens"):
        pipe([PROMPT], replace(HOT, response_format=dead))
    assert pipe([PROMPT], replace(HOT, response_format=regex("ab")))[0].text == "ab"


def test_response_formats():
    assert parse_response_format(None) is None and parse_response_format({"type": "text"}) is None
    assert GenerationConfig(response_format=regex("a")).grammar == Grammar("regex", "a")
    assert hash(GenerationConfig(response_format=json_schema(PERSON)))
    assert parse_response_format(json_schema(json.dumps(PERSON))) == parse_response_format(
        json_schema(PERSON)
    )
    for bad in (
        "json",
        {"type": "xml"},
        {"type": "json_schema"},
        json_schema([1]),
        json_schema("{"),
        regex(None),
        {"type": "choice", "choice": ["a", 1]},
        {"type": "choice", "choice": []},
    ):
        with pytest.raises(UsageError, match="response_format"):
            GenerationConfig(response_format=bad)
    with pytest.raises(UsageError, match="allowed_token_ids"):
        GenerationConfig(response_format=regex("a"), allowed_token_ids=[1])


@pytest.fixture
async def client(fake_engine):
    with serving(fake_engine) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
# The double counts upwards from the prompt's last token, and takes the next token that may come.
FORMATS = [
    ({"response_format": json_schema({"const": {"a": True}})}, '{"a":true}'),
    ({"response_format": regex("[b-d]{4}")}, "bcdb"),
    ({"extra_body": {"guided_json": {"enum": ["only"]}}}, '"only"'),
    ({"extra_body": {"guided_json": '{"enum": ["only"]}'}}, '"only"'),
    ({"extra_body": {"guided_regex": "x[a-c]"}}, "xa"),
    ({"extra_body": {"guided_choice": ["zebra"]}}, "zebra"),
    ({"extra_body": {"structured_outputs": {"json": {"enum": ["only"]}}}}, '"only"'),
    ({"extra_body": {"structured_outputs": {"regex": "x[a-c]"}}}, "xa"),
    ({"extra_body": {"structured_outputs": {"choice": ["zebra"]}}}, "zebra"),
    ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}}, "q0"),
    ({"extra_body": {"guided_grammar": 'root ::= "q" [0-9]'}}, "q0"),
]


@pytest.mark.parametrize(("more", "text"), FORMATS)
async def test_chat(client, more, text):
    answer = await client.chat.completions.create(**CHAT, **more)
    said = answer.choices[0].message.content
    assert "".join(said.split()) == text and answer.choices[0].finish_reason == "stop"


async def test_a_stream_and_completions(client):
    stream = await client.chat.completions.create(**CHAT, stream=True, n=2, response_format=regex("[b-d]{4}"))
    said = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == {0: "bcdb", 1: "bcdb"}
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b"], temperature=0, extra_body={"guided_choice": ["zebra", "giraffe"]}
    )
    assert [c.text for c in answer.choices] == ["giraffe", "giraffe"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": json_schema({"type": "nonsense"})}, "Invalid type: nonsense"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"extra_body": {"guided_regex": "[a"}}, "unclosed character class"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": [1]}}}, "structured_outputs.json"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "give one of them"),
        ({"response_format": regex("a"), "extra_body": {"allowed_token_ids": [97]}}, "allowed_token_ids"),
    ],
)
async def test_bad_requests(client, fake_engine, more, words):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT, **more)
    assert words in caught.value.body["message"] and "\n" not in caught.value.body["message"]
    assert not fake_engine._engine.requests


async def test_a_guide_that_breaks_is_reported(fake_engine, monkeypatch):
    """Its sequence would wait for ever."""

    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("turbomill.engine.guide.Guide.follow", broken)
    with pytest.raises(EngineError, match="the guide failed: ZeroDivisionError"):
        async with asyncio.timeout(20):
            async for _ in fake_engine.generate("hi", GenerationConfig(response_format=regex("[a-z]{9}"))):
                pass
