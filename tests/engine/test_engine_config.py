import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbomill.engine.cache_size import SLACK, CacheSize, cache_block_count, free_memory, show_bytes
from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.errors import UsageError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 1e6),
        ("logit_bias", {5: 101}),
        ("logit_bias", {"a": 1}),
        ("min_new_tokens", -1),
        ("bad_words", [""]),
        ("bad_token_ids", [-1]),
        ("allowed_token_ids", ["a"]),
        ("logprobs", 21),
        ("prompt_logprobs", True),
        ("n", 0),
        ("priority", 1.5),
    ],
)
def test_rules_name_the_field(field, value):
    with pytest.raises(UsageError, match=f"^{field} is .*, expected "):
        GenerationConfig(**{field: value})


def test_rules_stay_hashable_and_samples_have_their_own_seeds():
    gen = GenerationConfig(logit_bias={7: 1.5}, bad_words="no", n=3, seed=4, prompt_logprobs=1)
    assert hash(gen) and gen.logit_bias == ((7, 1.5),) and gen.bad_words == ("no",)
    assert [(g.n, g.seed, g.prompt_logprobs) for g in gen.samples()] == [
        (1, 4, 1),
        (1, 5, None),
        (1, 6, None),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_len", 1),
        ("session_len", 2.5),
        ("max_batch_size", 0),
        ("max_prefill_token_num", -1),
        ("cache_block_seq_len", 0),
        ("quant_policy", 5),
        ("num_threads", -1),
        ("cache_dtype", "int8"),
        ("backend", "tensorrt"),
        ("cache_max_entry_count", "lots"),
    ],
)
def test_engine_config_names_the_field_and_value(field, value):
    with pytest.raises(UsageError) as caught:
        EngineConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} is {value!r}, expected ") and "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("seed", 2**64),
        ("stop_words", [""]),
        ("stop_token_ids", [-1]),
    ],
)
def test_generation_config_names_the_field(field, value):
    with pytest.raises(UsageError, match=f"^{field} is "):
        GenerationConfig(**{field: value})


def test_generation_config_takes_lists_and_single_values():
    gen = GenerationConfig(stop_words="end", stop_token_ids=[1, 2])
    assert gen.stop_words == ("end",) and gen.stop_token_ids == (1, 2)
    assert GenerationConfig(do_sample=True, temperature=0).greedy and GenerationConfig().greedy
    assert not GenerationConfig(do_sample=True).greedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0.8, CacheSize(share=0.8)),
        ("0.5", CacheSize(share=0.5)),
        ("1.0", CacheSize(share=1.0)),
        (1, CacheSize(blocks=1)),
        ("512", CacheSize(blocks=512)),
        ("20GiB", CacheSize(nbytes=20 << 30)),
        ("1.5 GB", CacheSize(nbytes=3 << 29)),
        ("64mib", CacheSize(nbytes=64 << 20)),
    ],
)
def test_cache_size_is_read(text, expected):
    assert CacheSize.parse(text) == expected


@pytest.mark.parametrize("text", [0, 0.0, 1.5, -1, "", "much", "0GiB", "20Gi", "-0.5", "nan"])
def test_cache_size_refuses(text):
    with pytest.raises(UsageError, match="cache_max_entry_count is"):
        CacheSize.parse(text)


@given(
    batch=st.integers(1, 300),
    session=st.integers(2, 10_000),
    block=st.integers(1, 10**7),
    free=st.integers(0, 10**12),
    share=st.floats(0.01, 1.0),
)
def test_cache_blocks_fit_the_budget_and_a_session(batch, session, block, free, share):
    config = EngineConfig(max_batch_size=batch, cache_max_entry_count=share)
    per_session = -(-session // 64)
    try:
        blocks = cache_block_count(config, session, block, free)
    except UsageError:
        assert int(share * free) < per_session * block
        return
    assert per_session <= blocks <= batch * per_session + SLACK
    assert blocks * block <= share * free
    assert blocks == batch * per_session + SLACK or (blocks + 1) * block > int(share * free)


def test_cache_too_small_for_one_session_names_bytes_and_the_way_out():
    config = EngineConfig(cache_max_entry_count="10MiB")
    with pytest.raises(UsageError) as caught:
        cache_block_count(config, 8192, 1 << 20, 1 << 40)
    message = str(caught.value)
    assert "128.0 MiB" in message and "10.0 MiB" in message and "--session-len 640" in message
    assert "\n" not in message


def test_free_memory_is_plausible():
    assert 1 << 20 < free_memory() < 1 << 50


def test_show_bytes():
    assert [show_bytes(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
