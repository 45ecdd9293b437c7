"""`eval kv` on tiny models: figures, outliers in K, verdicts, the command."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from reports_models import byte_tokenizer, make_model, policy

from turbomill.cli import cli
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.stores import open_model
from turbomill.errors import UsageError
from turbomill.reports.evaluation import EvalOptions
from turbomill.reports.kv import KvOptions, bytes_per_token, context_lengths, decode_load, evaluate_kv
from turbomill.reports.kv_policies import EVALUATED, parse_policies
from turbomill.reports.kv_stats import measure_kv, rounded
from turbomill.reports.runs import ByLength, LayerKv, load_run
from turbomill.reports.text import load_eval_windows
from turbomill.reports.verdict import Thresholds, conclude, judge, sensitive_layers

pytest.importorskip("turbomill._core")


def test_policies(tiny, text_file, tmp_path):
    options = EvalOptions(str(text_file), windows=2, window_len=256, num_threads=2, cache=tmp_path / "cache")
    wanted = KvOptions(("16", "8", "4"), items=1, rounds=1, memory=8 << 20)
    run = evaluate_kv(str(tiny), options, wanted, work_dir=tmp_path / "run")
    wide, byte, nibble = run.policies
    assert [p.name for p in run.policies] == ["16", "8", "4"]
    assert abs(wide.kl) < 1e-6 and 0 < byte.kl < nibble.kl and wide.top1 == 1
    assert wide.bits_per_token > byte.bits_per_token > nibble.bits_per_token
    assert wide.sequences < byte.sequences < nibble.sequences
    assert all(p.decode_tok_s > 0 and p.ppl > 1 for p in run.policies)
    # One length, 256 tokens: the whole window, whose mean is the policy's own (less the last position's KL).
    assert [at.tokens for at in nibble.by_length] == [256]
    assert nibble.by_length[0].ppl == pytest.approx(nibble.ppl)
    assert nibble.by_length[0].kl == pytest.approx(nibble.kl)
    assert nibble.passkey == nibble.by_length[0].passkey == 0 and 0 <= nibble.copied <= 1
    assert wide.verdict == "safe" and [row.layer for row in run.kv_layers] == [0, 1]
    assert load_run(tmp_path / "run") == run


def test_context_lengths_and_their_scores(tiny, text_file, tmp_path, monkeypatch):
    """Positions fall into the length of their context, and together give the whole."""
    monkeypatch.setattr("turbomill.reports.kv.SHORTEST", 16)
    assert context_lengths(64) == [16, 32, 64] and context_lengths(70) == [16, 32, 64, 70]
    assert context_lengths(9) == [9]
    options = EvalOptions(str(text_file), windows=3, window_len=64, num_threads=2, cache=tmp_path / "cache")
    wanted = KvOptions(("16",), items=0, rounds=1, sensitivity=False)
    (row,) = evaluate_kv(str(tiny), options, wanted, work_dir=tmp_path / "run").policies
    counts = [16, 16, 31]  # predicted tokens of a window of 64
    mean = sum(n * np.log(at.ppl) for n, at in zip(counts, row.by_length, strict=True)) / 63
    assert row.ppl == pytest.approx(np.exp(mean)) and len({at.ppl for at in row.by_length}) == 3
    model = load_dense_model(open_checkpoint(tiny))
    ids = load_eval_windows(open_model(tiny), options).ids
    with torch.inference_mode():
        log_p = model(input_ids=ids).logits.double().log_softmax(-1)
    nll = -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert row.by_length[1].ppl == pytest.approx(float(nll[:, 16:32].mean().exp()), rel=1e-3)


def test_another_reference(tiny, tiny_rtn, text_file, tmp_path):
    options = EvalOptions(str(text_file), windows=1, window_len=64, num_threads=2, cache=tmp_path / "cache")
    wanted = KvOptions(("16",), items=0, rounds=1, sensitivity=False)
    run = evaluate_kv(str(tiny_rtn), options, wanted, reference=str(tiny))
    # Beyond the unquantized cache there is nothing to hold against it.
    assert run.policies[0].kl > 1e-3 and run.verdict == "safe"


@torch.inference_mode()
def dense_layer(path, ids):
    """Layer 0 of a Llama by the formulas: K [T, Nkv, D] behind RoPE, and the attention's outputs [T, Nq, D]
    as they are, with K and with V rounded to 4 bits."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = load_dense_model(open_checkpoint(path)).model
    layer, length = model.layers[0], ids.shape[1]
    x = layer.input_layernorm(model.embed_tokens(ids))
    q, k, v = (
        getattr(layer.self_attn, f"{name}_proj")(x).view(1, length, -1, 16).transpose(1, 2) for name in "qkv"
    )
    q, k = apply_rotary_pos_emb(q, k, *model.rotary_emb(x, torch.arange(length)[None]))

    def attend(k, v):
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / 4 + torch.full((length, length), -torch.inf).triu(1)
        return (scores.softmax(-1) @ v)[0]

    return k[0], attend(k, v), attend(rounded(k, 4), v), attend(k, rounded(v, 4))


def test_sensitivity_equals_the_formulas(tiny, tiny_store):
    ids = torch.arange(40)[None] * 5 % 256
    row = measure_kv(tiny_store, ids)[0]
    k, exact, with_k, with_v = dense_layer(tiny, ids)
    absmax = k.abs().amax(1)  # [Nkv, D]
    assert row.k_absmax == pytest.approx(float(absmax.max()), rel=1e-4)
    assert row.k_outlier == pytest.approx(float((absmax.amax(-1) / absmax.median(-1).values).max()), rel=1e-4)
    energy = exact.square().sum()
    assert row.k_error["4"] == pytest.approx(float((with_k - exact).square().sum() / energy), rel=0.02)
    assert row.v_error["4"] == pytest.approx(float((with_v - exact).square().sum() / energy), rel=0.02)
    assert row.k_error["8"] < row.k_error["4"] / 50 and row.v_error["8"] < row.v_error["4"] / 50


def test_every_kind_of_store_is_measured(tiny, tiny_store, tiny_rtn, tmp_path):
    """Quantized linears, and q, k and v in one published tensor: as the dense Llama that it stands for."""
    ids = torch.arange(40)[None] * 5 % 256
    dense, packed = measure_kv(tiny_store, ids), measure_kv(open_model(tiny_rtn), ids)
    for row, other in zip(dense, packed, strict=True):
        assert other.k_outlier == pytest.approx(row.k_outlier, rel=0.3) and other != row
    from safetensors.torch import load_file, save_file

    joined = tmp_path / "baichuan"
    joined.mkdir()
    model = make_model(tmp_path / "llama", num_key_value_heads=4)
    tensors = load_file(model / "model.safetensors")
    for i in range(2):
        parts = [tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"model.layers.{i}.self_attn.W_pack.weight"] = torch.cat(parts)
    save_file(tensors, joined / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan"}
    (joined / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(joined)
    assert measure_kv(open_model(joined), ids) == measure_kv(open_model(model), ids)


def test_rounding_equals_the_caches_definition():
    """By hand: fp16 scale and zero of each row, as formats' quant_policy 4."""
    x = torch.tensor([[0.0, 1.0, 7.4, 15.0], [-3.0, -3.0, -3.0, -3.0]])
    assert rounded(x, 4).tolist() == [[0, 1, 7, 15], [-3, -3, -3, -3]]


def outlier_model(path, size):
    """A Qwen2 whose k_proj has a bias of `size` in one channel of each head: K is large there, always."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[[7, 16 + 7]] = size  # of the slowest rotation: large at every token
    model.half().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_large_channels_in_k_are_recognised_from_its_values(text_file, tmp_path):
    options = EvalOptions(str(text_file), windows=2, window_len=128, num_threads=2, cache=tmp_path / "cache")
    wanted = KvOptions(("16", "8", "4", "4r"), items=0, rounds=1)
    broken = evaluate_kv(str(outlier_model(tmp_path / "outliers", 120.0)), options, wanted)
    plain = evaluate_kv(str(outlier_model(tmp_path / "plain", 0.0)), options, wanted)
    assert all(row.k_outlier > 20 for row in broken.kv_layers)
    assert all(row.k_outlier < 10 for row in plain.kv_layers)
    nibble, ordinary = broken.policies[2], plain.policies[2]
    assert nibble.verdict == "do not use" and any(
        "outlier channels in layers 0, 1" in r for r in nibble.reasons
    )
    assert nibble.kl > 5 * ordinary.kl and not any("outlier" in reason for reason in ordinary.reasons)
    # K is what suffers, not V.
    for row, usual in zip(broken.kv_layers, plain.kv_layers, strict=True):
        assert row.k_error["4"] > 10 * usual.k_error["4"] and row.v_error["4"] < 3 * usual.v_error["4"]
    # Rotated, it is as good as in the model without them.
    rotated, usual = broken.policies[3], plain.policies[3]
    assert rotated.kl < nibble.kl / 5 and rotated.kl < 3 * usual.kl
    assert not any("outlier" in reason for reason in rotated.reasons)
    for row in broken.kv_layers:
        assert row.k_error["4r"] < row.k_error["4"] / 5
    assert (broken.recommended["quant_policy"], broken.recommended["rotation"]) != (4, False)


def measured(bits, kl, passkey=None, copy=None, lengths=()):
    row = policy(bits, kl=kl)
    at = [ByLength(tokens=n, ppl=9.0, kl=k) for n, k in lengths]
    return row.model_copy(update={"passkey": passkey, "copied": copy, "by_length": at})


LARGE = LayerKv(layer=3, k_absmax=90, k_outlier=50, k_error={"8": 0, "4": 0}, v_error={"8": 0, "4": 0})


@pytest.mark.parametrize(
    ("row", "base", "layers", "verdict", "why"),
    [
        (measured(8, 0.01), measured(16, 0.0), [], "safe", None),
        (measured(8, 0.011), measured(16, 0.0), [], "test first", "KL grows by 0.0110, more than 0.01"),
        (measured(8, 0.11), measured(16, 0.0), [], "do not use", "more than 0.1"),
        (measured(8, 0.31), measured(16, 0.305), [], "safe", None),
        (
            measured(8, 0.001, lengths=[(256, 0.0), (512, 0.2)]),
            measured(16, 0.0, lengths=[(256, 0.0), (512, 0.0)]),
            [],
            "do not use",
            "KL grows by 0.2000",
        ),
        (measured(8, 0.0, 0.9), measured(16, 0.0, 1.0), [], "test first", "passkey accuracy falls from 1.00"),
        (measured(8, 0.0, 1.0, 0.5), measured(16, 0.0, 1.0, 0.9), [], "do not use", "copy accuracy falls"),
        (measured(8, 0.0, 0.9), measured(16, 0.0, 0.7), [], "safe", None),
        (measured(4, 0.0), measured(16, 0.0), [LARGE], "test first", "outlier channels in layers 3"),
        (measured(8, 0.0), measured(16, 0.0), [LARGE], "safe", None),
    ],
)
def test_verdicts(row, base, layers, verdict, why):
    found, reasons = judge(row, base, layers, Thresholds())
    assert found == verdict and (not reasons if why is None else why in reasons[0])


def test_thresholds_are_the_users():
    row, base = measured(8, 0.05), measured(16, 0.0)
    assert judge(row, base, [], Thresholds(kl_safe=0.06))[0] == "safe"
    assert judge(row, base, [], Thresholds(kl_max=0.04))[0] == "do not use"
    for wrong in ({"kl_safe": 0.2}, {"drop_max": 0.01}, {"outlier": 0.5}, {"kl_safe": float("nan")}):
        with pytest.raises(UsageError, match="expected"):
            Thresholds(**wrong)


def test_the_smallest_safe_cache_is_recommended():
    def rows(*verdicts):
        return [
            policy(bits).model_copy(update={"verdict": verdict})
            for bits, verdict in zip((16, 8, 4), ("safe", *verdicts), strict=True)
        ]

    for verdicts, best, chosen in (
        (("safe", "safe"), "safe", 4),
        (("safe", "do not use"), "safe", 8),
        (("test first", "do not use"), "test first", 0),
        (("do not use", "do not use"), "do not use", 0),
    ):
        verdict, recommended = conclude(rows(*verdicts))
        assert (verdict, recommended["quant_policy"]) == (best, chosen)
    # Of two caches of one size, the one that errs less.
    int8 = policy(8).model_copy(update={"verdict": "safe", "kl": 0.0004})
    fp8 = int8.model_copy(update={"name": "fp8", "quant_policy": 16, "kl": 0.007})
    for both in ([int8, fp8], [fp8, int8]):
        assert conclude(both)[1]["quant_policy"] == 8


def test_policies_are_read():
    assert parse_policies("8") == ("16", "8") and parse_policies("0,16,8,k8v4r,4, 4r") == EVALUATED
    with pytest.raises(UsageError, match="--policies 8,5: '5' is not one of"):
        parse_policies("8,5")


@pytest.mark.parametrize("wrong", [{"items": -1}, {"rounds": 0}])
def test_options_are_checked(wrong):
    with pytest.raises(UsageError, match="expected at least"):
        KvOptions(**wrong)


def test_command(tiny_store, text_file):
    base = ["eval", "kv", str(tiny_store.path), "--dataset", str(text_file), "--windows", "2"]
    base += ["--window-len", "64", "--items", "0", "--test-round", "1", "--num-threads", "2", "--json"]
    loose = CliRunner().invoke(cli, [*base, "--policies", "8", "--kl-safe", "9", "--kl-max", "9"])
    assert loose.exit_code == 0, loose.output
    found = json.loads(loose.stdout)
    assert list(found) == ["policies", "verdict", "recommended"] and found["verdict"] == "safe"
    keys = ["name", "bits_per_token", "ppl", "kl", "by_length", "passkey", "copy", "verdict"]
    assert [list(row) for row in found["policies"]] == [keys, keys]
    assert list(found["policies"][0]["by_length"][0]) == ["tokens", "ppl", "kl", "passkey", "copy"]
    assert found["recommended"]["quant_policy"] == 8
    strict = [*base, "--policies", "4", "--kl-safe", "0", "--no-sensitivity"]
    assert CliRunner().invoke(cli, [*strict, "--kl-max", "9"]).exit_code == 3
    assert CliRunner().invoke(cli, [*strict, "--kl-max", "0"]).exit_code == 4
    shown = CliRunner().invoke(cli, [a for a in base if a != "--json"])
    assert "By context length" in shown.stdout and "Recommended: --quant-policy" in shown.stdout


def test_bytes_per_token_by_hand(tiny):
    """2 layers, K and V, 2 heads of 16: fp16; or codes and a 16-bit scale and zero for each head."""
    store = open_model(tiny)
    values = 2 * 2 * 2
    assert bytes_per_token(store, KvScheme()) == values * 16 * 2
    assert bytes_per_token(store, KvScheme(), "float32") == values * 16 * 4
    assert bytes_per_token(store, KvScheme(8)) == values * (16 + 4)
    assert bytes_per_token(store, KvScheme(4)) == values * (8 + 4)
    assert bytes_per_token(store, KvScheme("k8v4")) == values * (12 + 4)
    assert bytes_per_token(store, KvScheme(4, layers_16bit=(1,))) == values / 2 * (8 + 4 + 32)


@pytest.mark.parametrize("length", [2, 3, 50, 96, 4096])
def test_decode_measurement_fits_the_session(tiny_store, length):
    load = decode_load(tiny_store, max(length, 3))
    assert load.prompt_tokens + load.completion_tokens <= min(max(length, 3), 256)


def test_layers_that_would_make_rotated_int4_safe():
    """By hand: a KL of 0.05 splits into 0.02, 0.005 and 0.025; 0.01 is safe."""

    def layer(number, error):
        return LayerKv(layer=number, k_absmax=1, k_outlier=2, k_error={"4r": error}, v_error={"4r": 0.0})

    layers = [layer(0, 0.4), layer(1, 0.1), layer(2, 0.5)]
    row, base = policy(4, kl=0.05, rotation=True), policy(16)
    assert sensitive_layers(row, base, layers, Thresholds()) == (0, 2)
    assert sensitive_layers(row, base, layers, Thresholds(kl_safe=0.03)) == (2,)
    assert sensitive_layers(row, base, layers, Thresholds(kl_safe=0.06)) == ()


def test_rotated_int4_is_tried_with_layers_in_16_bits(tiny, text_file, tmp_path):
    options = EvalOptions(str(text_file), windows=2, window_len=128, num_threads=2, cache=tmp_path / "cache")
    wanted = KvOptions(("16", "4r"), items=0, rounds=1)
    rotated = evaluate_kv(str(tiny), options, wanted).policies[1]
    worst = max(at.kl for at in rotated.by_length)
    strict = KvOptions(("16", "4r"), items=0, rounds=1, thresholds=Thresholds(kl_safe=0.9 * worst, kl_max=9))
    run = evaluate_kv(str(tiny), options, strict)
    assert [p.name for p in run.policies] == ["16", "4r", "4r+1"]
    mixed = run.policies[2]
    assert len(mixed.layers_16bit) == 1 and mixed.kl < rotated.kl
    assert mixed.bytes_per_token == (rotated.bytes_per_token + run.policies[0].bytes_per_token) / 2
    if mixed.verdict == "safe":
        assert run.recommended["options"] == f"--quant-policy 4 --kv-16bit-layers {mixed.layers_16bit[0]}"
