"""Rules for the next token, and logprobs, against a slow loop over the engine's own logits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_engine import Native, store_of, tiny_llama
from test_native_scheduling import prompt

V = 320
FEW = list(range(12))  # a random model repeats itself only when it may choose from few tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("sampling") / "model"
    tiny_llama(path)
    return store_of(path)


def slow_greedy(engine: Native, ids: list[int], count: int, edit: Any) -> list[int]:
    """argmax of edited logits, one full forward pass a token. `edit(logits, generated)`."""
    out: list[int] = []
    for _ in range(count):
        logits = engine.logits(ids + out)[-1].astype(np.float64)
        edit(logits, out)
        out.append(int(logits.argmax()))
    return out


def penalties(ids: list[int], repetition: float, presence: float, frequency: float) -> Any:
    def edit(logits: np.ndarray, out: list[int]) -> None:
        for token in set(ids) | set(out):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token, count in Counter(out).items():
            logits[token] -= presence + frequency * count
        logits[FEW[-1] + 1 :] = -np.inf

    return edit


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0, 0), (1.0, 1.5, 0), (1.0, 0, 0.7), (0.8, -0.5, 0.3)]
)
def test_penalties(store: Any, repetition: float, presence: float, frequency: float) -> None:
    with Native(store) as engine:
        ids = [*prompt(12), 5, 7]
        fields = {
            "repetition_penalty": repetition,
            "presence_penalty": presence,
            "frequency_penalty": frequency,
        }
        got = engine.generate(ids, 20, allowed_token_ids=FEW, **fields)
        assert got == slow_greedy(engine, ids, 20, penalties(ids, repetition, presence, frequency))
        assert got != engine.generate(ids, 20, allowed_token_ids=FEW)


def test_bias_and_allowed_tokens(store: Any) -> None:
    with Native(store) as engine:
        ids = prompt(9)
        free = engine.generate(ids, 10)

        def bias(logits: np.ndarray, _: list[int]) -> None:
            logits[free[0]] -= 100
            logits[77] += 2.5

        got = engine.generate(ids, 10, logit_bias_ids=[free[0], 77], logit_biases=[-100.0, 2.5])
        assert got == slow_greedy(engine, ids, 10, bias)

        def allow(logits: np.ndarray, _: list[int]) -> None:
            logits[[t for t in range(V) if t not in (4, 9, 200)]] = -np.inf

        got = engine.generate(ids, 10, allowed_token_ids=[4, 9, 200])
        assert got == slow_greedy(engine, ids, 10, allow)
        drawn = engine.generate(ids, 60, allowed_token_ids=[4, 9, 200], temperature=9.0, seed=1)
        assert set(drawn) == {4, 9, 200}


def test_bad_words_are_never_completed(store: Any) -> None:
    """Of one token and of several, which the text would contain otherwise."""
    with Native(store) as engine:
        ids = prompt(9)
        words: list[list[int]] = []

        def ban(logits: np.ndarray, out: list[int]) -> None:
            for word in words:
                text = ids + out
                if text[len(text) - len(word) + 1 :] == word[:-1]:
                    logits[word[-1]] = -np.inf

        for length in (1, 2, 3, 2):
            free = engine.generate(ids, 14, bad_words=words)
            at = 3
            words.append(free[at : at + length])
            got = engine.generate(ids, 14, bad_words=words)
            assert got == slow_greedy(engine, ids, 14, ban)
            assert got != free


def test_a_bad_word_may_begin_in_the_prompt(store: Any) -> None:
    with Native(store) as engine:
        ids = prompt(9)
        first, second, *_ = engine.generate(ids, 3)
        got = engine.generate(ids, 3, bad_words=[[*ids[-2:], first]])
        assert got[0] != first
        assert engine.generate(ids, 3, bad_words=[[ids[-1], first, second]])[:2] != [first, second]


def test_no_stop_before_the_least_length(store: Any) -> None:
    with Native(store) as engine:
        ids = prompt(20)
        free = engine.generate(ids, 30)
        stops = free[2:4]

        def ban(logits: np.ndarray, out: list[int]) -> None:
            if len(out) < 12:
                logits[stops] = -np.inf

        expected = slow_greedy(engine, ids, 30, ban)
        end = next((i for i, t in enumerate(expected) if i >= 12 and t in stops), 30)
        got = engine.generate(ids, 30, stop_token_ids=stops, min_new_tokens=12)
        assert got == expected[:end]
        assert len(got) >= 12 > len(engine.generate(ids, 30, stop_token_ids=stops))


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2, "temperature": 1.0},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "temperature": 0.9, "top_k": 30},
    {"logit_bias_ids": [5, 6], "logit_biases": [3.0, -4.0], "temperature": 1.0, "min_p": 0.05},
    {"bad_words": [[7], [8, 9]], "temperature": 1.3, "top_p": 0.9},
    {"allowed_token_ids": list(range(40, 140)), "temperature": 1.5},
    {"temperature": 1.0, "logprobs": 3},
    {},
]


def test_same_seed_same_text_whatever_the_batch_and_the_pool(store: Any) -> None:
    """Rules see the text's own history, whatever else runs, and however often a sequence is preempted."""
    with Native(store, enable_prefix_caching=False) as engine:
        alone = [engine.generate(prompt(20, seed=i), 60, seed=i, **r) for i, r in enumerate(RULES)]
    for config in ({}, {"cache_block_count": 13, "block_len": 16}):
        with Native(store, **config) as engine:
            requests = [
                engine.submit(prompt(20, seed=i), 60, seed=i, **r)
                for i, r in enumerate(RULES)
                for _ in (0, 1)
            ]
            texts = [engine.tokens(r) for r in requests]
            assert texts == [text for text in alone for _ in (0, 1)]
            if config:
                assert engine.engine.metrics().preemptions > 0


def check(logprobs: Any, logits: np.ndarray, token: int, count: int) -> None:
    exact = logits.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    assert logprobs.logprob == pytest.approx(exact[token], abs=1e-3)
    assert len(logprobs.top) == count
    np.testing.assert_allclose([p for _, p in logprobs.top], np.sort(exact)[::-1][:count], atol=1e-3)


@pytest.mark.parametrize("count", [0, 4, 20])
def test_logprobs_are_the_models_own(store: Any, count: int) -> None:
    """Neither temperature nor penalties change what is reported."""
    with Native(store) as engine:
        ids = prompt(15)
        fields = {"temperature": 1.7, "seed": 5, "repetition_penalty": 1.4, "logprobs": count}
        outputs = engine.wait(engine.submit(ids, 12, **fields))
        tokens = [t for o in outputs for t in o.token_ids]
        reported = [x for o in outputs for x in o.logprobs]
        assert len(reported) == len(tokens) == 12
        logits = engine.logits(ids + tokens)
        for i, (token, logprobs) in enumerate(zip(tokens, reported, strict=True)):
            check(logprobs, logits[len(ids) + i - 1], token, count)


@pytest.mark.parametrize("config", [{}, {"max_prefill_token_num": 24}, {"cache_block_count": 10}])
def test_prompt_logprobs(store: Any, config: dict[str, Any]) -> None:
    """One for each prompt token from the second on, once, however the prompt is cut or started again."""
    with Native(store) as engine:
        ids = prompt(100)
        logits = engine.logits(ids)
    with Native(store, block_len=16, **config) as engine:
        engine.generate(ids, 2)  # its blocks are there, but logprobs are wanted
        others = [engine.submit(prompt(60, seed=i), 40) for i in range(4)] if config else []
        outputs = engine.wait(engine.submit(ids, 5, prompt_logprobs=2, logprobs=1))
        reported = [x for o in outputs for x in o.prompt_logprobs]
        assert len(reported) == 99
        for i, logprobs in enumerate(reported):
            check(logprobs, logits[i], ids[i + 1], 2)
        assert len([x for o in outputs for x in o.logprobs]) == 5
        for request in others:
            assert len(engine.tokens(request)) == 40


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 1e9}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias_ids": [1], "logit_biases": []}, "logit_bias"),
        ({"logit_bias_ids": [320], "logit_biases": [1.0]}, "logit_bias"),
        ({"logit_bias_ids": [3], "logit_biases": [1e6]}, "logit_bias"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[3, -1]]}, "bad_words"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
    ],
)
def test_rules_that_mean_nothing_are_refused(store: Any, fields: dict[str, Any], message: str) -> None:
    with Native(store) as engine, pytest.raises(ValueError, match=message):
        engine.submit([5], **fields)
