"""`plan`: arithmetic against real stores and the real engine's block count, and questions both ways."""

import json

import pytest
from click.testing import CliRunner
from reports_models import make_model

from turbomill.cli import cli
from turbomill.engine import turbomind
from turbomill.engine.config import EngineConfig
from turbomill.engine.stores import open_model
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.kv_policies import POLICIES
from turbomill.reports.memory import CONTEXT, GPUS, parse_memory, shape_of
from turbomill.reports.plan import Demand, answer, choose, plan, plan_json

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def llama(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA3_8B))
    return str(file)


def test_llama_by_hand(llama):
    """8.03 billion parameters; 2 * 32 layers * 8 heads * 128 * 2 bytes a token."""
    shape = shape_of(llama)
    assert shape.weights["16"] == 2 * 8_030_261_248
    linears = 32 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    others = 2 * (8_030_261_248 - linears)
    assert shape.weights["4"] == others + linears // 2 + linears // 128 * 4
    assert shape.weights["8"] == others + linears + linears // 128 * 4
    assert [shape.kv_bytes_per_token(POLICIES[p]) for p in ("16", "8", "fp8", "k8v4", "4r")] == [
        *(131072, 67584, 67584, 51200, 34816)
    ]
    assert shape.kv_bytes_per_token(POLICIES["4"], (0, 31)) == 30 * 8 * 136 + 2 * 8 * 512


def nibbles(shape, demand):
    """The row of 4-bit weights with a rotated 4-bit cache."""
    return next(f for f in plan(shape, demand) if (f.weights, f.kv) == ("4", "4r"))


def test_question_back(llama):
    """200 conversations of 16k tokens are 3.3 million tokens: 114 GB with 4 bits in the cache."""
    shape, memory = shape_of(llama), parse_memory("H200")
    asked = Demand(memory, 16384, 200)
    fits = plan(shape, asked)
    assert [(f.weights, f.kv) for f in fits if f.fits] == [("4", "4r")]
    text = answer(shape, asked, fits)
    assert "fits with 4-bit weights and int4 rotated in the KV cache, which hold 202." in text
    more = Demand(memory, 16384, 220)
    best = nibbles(shape, more)
    assert choose(plan(shape, more)) is None and best.sequences == 202
    assert "does not fit; 4-bit weights with int4 rotated in the KV cache hold 202, or so many of" in answer(
        shape, more, plan(shape, more)
    )
    # The memory it names is enough, and two blocks' less is not; the session it names fits.
    assert nibbles(shape, Demand(best.needed_bytes + 1024, 16384, 220)).fits
    assert not nibbles(shape, Demand(best.needed_bytes - 2 * best.block_bytes, 16384, 220)).fits
    assert nibbles(shape, Demand(memory, best.longest_session, 220)).fits
    assert not nibbles(shape, Demand(memory, best.longest_session + 64, 220)).fits
    # 16-bit weights and int8 hold 96: quantizing the weights costs less than 4 bits in the cache.
    chosen = choose(plan(shape, Demand(memory, 16384, 100)))
    assert (chosen.weights, chosen.kv) == ("4", "8")


@pytest.mark.parametrize("policy", [0, 8, 4, 84, 16])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 3}])
def test_equals_the_engines_block_count(tmp_path, monkeypatch, policy, changes):
    pytest.importorskip("turbomill._core")
    free = 40 << 20
    monkeypatch.setattr(turbomind, "free_device_memory", lambda device, core: free)
    model = make_model(tmp_path / "model", **changes)
    config = EngineConfig(
        session_len=200, max_batch_size=100_000, quant_policy=policy, num_threads=1, device="cpu"
    )
    with turbomind.TurbomindEngine(str(model), config) as engine:
        real = engine.metrics().total_blocks
    fits = plan(shape_of(str(model / "config.json")), Demand(free, 200))
    fit = next(f for f in fits if f.weights == "16" and f.quant_policy == policy)
    assert fit.blocks == pytest.approx(real, rel=0.02) and fit.blocks > 100
    assert fit.sequences == fit.blocks // 4


def test_equals_the_stores_bytes(tiny, tiny_rtn):
    """Of a config alone, against what the converter really wrote."""
    shape = shape_of(str(tiny / "config.json"), group=64)
    for model, scheme in ((tiny, "16"), (tiny_rtn, "4")):
        real = sum(tensor.nbytes for tensor in open_model(model).tensors.values())
        assert shape.weights[scheme] == pytest.approx(real, rel=0.002)


def test_sparse_models_count_every_expert(tmp_path):
    config = {
        **{**LLAMA3_8B, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        **{"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)).weights["16"] == 2 * 46_702_792_704  # Mixtral 8x7B


def test_a_store_has_its_own_scheme(tiny_rtn):
    store = open_model(tiny_rtn)
    shape = shape_of(str(store.path))
    assert list(shape.weights) == [str(store.scheme)]
    fits = plan(shape, Demand(10 << 20, 64))
    assert choose(fits).quant_policy == 0 and fits[0].weight_bytes == next(iter(shape.weights.values()))


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 << 30), ("512 MiB", 512 << 20), ("a100-40", (40960 << 20) - CONTEXT)]
)
def test_memory_is_a_gpu_or_a_size(text, nbytes):
    assert parse_memory(text) == nbytes
    assert parse_memory("RTX 4090") == (GPUS["RTX4090"] << 20) - CONTEXT


@pytest.mark.parametrize("text", ["H900", "80", "", "0GiB"])
def test_other_memory_is_refused(text):
    with pytest.raises(UsageError, match=r"--gpu .*80GiB, or one of T4"):
        parse_memory(text)


def test_what_cannot_be_planned(llama, tmp_path):
    shape = shape_of(llama)
    with pytest.raises(UsageError, match="--session-len 200000: the model's context is 131072"):
        plan(shape, Demand(1 << 40, 200_000))
    with pytest.raises(UsageError, match="--conversations 0"):
        Demand(1 << 40, 10, 0)
    with pytest.raises(UsageError, match="cache_max_entry_count"):
        Demand(1 << 40, 10, share="much")
    (tmp_path / "other").mkdir()
    with pytest.raises(TurbomillError, match=r"other: neither config\.json"):
        shape_of(str(tmp_path / "other"))
    small = Demand(1 << 30, 100)
    assert "the weights alone take" in answer(shape, small, plan(shape, small))


def test_command(llama):
    arguments = ["plan", llama, "--gpu", "80GiB", "--session-len", "16384"]
    result = CliRunner().invoke(cli, [*arguments, "--conversations", "40", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["rows"]) == 15 and found["recommended"] == {"weights": "16", "quant_policy": 8}
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0 and "one conversation of 16,384 tokens" in shown.stdout
    assert "8 bits: the store keeps 8-bit weights in 16 bits" in " ".join(shown.stdout.split())
    assert CliRunner().invoke(cli, [*arguments, "--conversations", "4000"]).exit_code == 1
    shape, tiny = shape_of(llama), Demand(1 << 30, 9)
    assert plan_json(shape, tiny, plan(shape, tiny))["recommended"] is None
