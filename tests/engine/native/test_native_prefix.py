"""The prefix cache: the same text with and without it, and no prompt token computed twice without need."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_engine import Native, store_of, tiny_llama
from test_native_scheduling import all_blocks_back, prompt, settled

P = 16  # tokens per block; from P/4 on, rows of a block are worth a copy


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("prefix") / "model"
    tiny_llama(path)
    return store_of(path)


def cached(engine: Native, request: int) -> int:
    return engine.wait(request)[-1].cached_tokens


def shared_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of three families: they share beginnings of all lengths, some are equal."""
    rng = random.Random(seed)
    stems = [prompt(150, seed=s) for s in range(3)]
    out = []
    for _ in range(count):
        stem = rng.choice(stems)
        out.append(
            stem[: rng.choice((5, 16, 33, 64, 90, 150))] + prompt(rng.choice((1, 3, 20)), rng.randrange(3))
        )
    return out


@pytest.mark.parametrize("blocks", [16, 20, 40, 200])
@pytest.mark.parametrize(
    "kv",
    [
        {"cache_dtype": "float16"},
        {"quant_policy": 8},
        {"quant_policy": 4},
        {"quant_policy": 4, "kv_rotation": True, "kv_16bit_layers": [1]},
        {"quant_policy": 84, "kv_rotation": True},
        {"quant_policy": 16},
    ],
)
def test_same_text_with_and_without(store: Any, kv: dict[str, Any], blocks: int) -> None:
    """Whatever is shared, evicted and preempted. 16 blocks are what one of the requests needs."""
    prompts = shared_prompts(24, seed=blocks)
    config = kv | {"block_len": P, "max_prefill_token_num": 64}
    fields = [{"temperature": 1.0 if i % 3 == 0 else 0.0, "seed": i % 2} for i in range(len(prompts))]

    def texts(engine: Native) -> list[list[int]]:
        requests = [engine.submit(p, 60, **f) for p, f in zip(prompts, fields, strict=True)]
        return [engine.tokens(r) for r in requests]

    with Native(store, cache_block_count=600, enable_prefix_caching=False, **config) as engine:
        expected = texts(engine)
        assert engine.engine.metrics().cached_tokens == 0
    with Native(store, cache_block_count=blocks, **config) as engine:
        assert texts(engine) == expected
        assert texts(engine) == expected  # and from what is cached by now
        metrics = settled(engine)
        assert all_blocks_back(metrics)
        assert metrics["cached_tokens"] > 0
        if blocks <= 20:
            assert metrics["preemptions"] > 0 and metrics["evictions"] > 0


def test_without_it_nothing_is_kept(store: Any) -> None:
    with Native(store, enable_prefix_caching=False) as engine:
        for _ in range(2):
            request = engine.submit(prompt(100), 5)
            assert cached(engine, request) == 0
        metrics = settled(engine)
        assert metrics["free_blocks"] == metrics["total_blocks"] and metrics["cached_blocks"] == 0


@pytest.mark.parametrize(("length", "found"), [(40, 39), (48, 47), (49, 48), (100, 96)])
def test_equal_prompts_sent_together_are_computed_once(store: Any, length: int, found: int) -> None:
    """All but the last token, whose logits each needs (and rows too few to copy), while the first is still
    being read in chunks.
    """
    with Native(store, block_len=P, max_prefill_token_num=24) as engine:
        requests = [engine.submit(prompt(length), 8, temperature=1.0, seed=s) for s in range(5)]
        assert [cached(engine, r) for r in requests] == [0] + [found] * 4
        assert len({tuple(engine.tokens(r)) for r in requests}) == 5
        assert settled(engine)["cached_tokens"] == 4 * found


def test_a_conversation_goes_on_without_prefilling(store: Any) -> None:
    """The next turn begins with the prompt and the answer of the last one."""
    with Native(store, block_len=P) as engine:
        history = prompt(37)
        for turn in range(4):
            request = engine.submit(history, 30)
            answer = engine.tokens(request)
            if turn:
                # An answer's last token was never run, a turn's 5 tokens are new, and up to 3 rows at the
                # end are not worth a copy.
                assert len(history) - 9 <= cached(engine, request) <= len(history) - 6
            with Native(store, enable_prefix_caching=False) as other:
                assert answer == other.generate(history, 30)
            history = history + answer + prompt(5, seed=turn)


def test_texts_that_part_within_a_block(store: Any) -> None:
    """The rows in common are copied; what either writes after them harms no other."""
    stem = prompt(P + 9)
    with Native(store, block_len=P, enable_prefix_caching=False) as engine:
        expected = [engine.generate(stem + prompt(4, seed=s), 40) for s in range(4)]
    with Native(store, block_len=P) as engine:
        first = engine.submit(stem + prompt(4, seed=0), 40)
        assert engine.tokens(first) == expected[0]
        later = [engine.submit(stem + prompt(4, seed=s), 40) for s in (1, 2, 3, 0)]
        assert [engine.tokens(r) for r in later] == [*expected[1:], expected[0]]
        # The last one shares more: all but its last token.
        assert [cached(engine, r) for r in later] == [P + 9, P + 9, P + 9, P + 12]


def test_few_rows_are_computed_rather_than_copied(store: Any) -> None:
    with Native(store, block_len=P) as engine:
        engine.generate(prompt(60), 3)
        assert cached(engine, engine.submit(prompt(60)[: P + 3] + prompt(5, seed=9), 3)) == P
        assert cached(engine, engine.submit(prompt(60)[: P + 4] + prompt(5, seed=9), 3)) == P + 4


def test_the_least_recently_used_go_first(store: Any) -> None:
    """Nine blocks hold three prompts; the fourth takes the place of the oldest, its end first."""
    texts = [prompt(3 * P, seed=s) for s in range(4)]
    with Native(store, block_len=P, cache_block_count=9) as engine:
        for text in texts[:3]:
            engine.generate(text, 1)
        engine.generate(texts[0], 1)  # used again: now the second is the oldest
        assert settled(engine)["evictions"] <= 2  # for the copies of last blocks
        engine.generate(texts[3][: 2 * P + 1], 1)
        found = [cached(engine, engine.submit(texts[i], 1)) for i in (0, 3)]
        assert found == [3 * P - 1, 2 * P]
        assert cached(engine, engine.submit(texts[1], 1)) < 3 * P - 1


def test_prompt_logits_are_all_there(store: Any) -> None:
    """A request that wants every position's logits computes every position, and others may use its blocks."""
    ids = prompt(90)
    with Native(store, block_len=P, max_prefill_token_num=40) as engine:
        expected = engine.logits(ids)
        np.testing.assert_allclose(engine.logits(ids), expected, atol=1e-5)
        assert expected.shape[0] == 90
        assert cached(engine, engine.submit(ids, 3)) == 89


def test_cancelled_requests_leave_what_they_computed(store: Any) -> None:
    with Native(store, block_len=P, max_prefill_token_num=P) as engine:
        first = engine.submit(prompt(400), 50)
        second = engine.submit(prompt(400), 50)
        while engine.engine.metrics().steps < 6:
            pass
        engine.engine.cancel(first)
        assert engine.finish(first) == "cancelled"
        assert len(engine.tokens(second)) == 50  # its producer is gone: it goes on by itself
        assert cached(engine, second) >= 4 * P
        assert all_blocks_back(settled(engine))


def test_logits_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "nan"
    tiny_llama(path)
    weights = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with Native(store_of(path), block_len=8) as engine:
        for _ in range(2):
            bad = engine.submit([5] * 20 + [7] + [5] * 20, 5)
            assert engine.finish(bad) == "error"
            assert cached(engine, bad) == 0
        assert settled(engine)["cached_blocks"] == 0
