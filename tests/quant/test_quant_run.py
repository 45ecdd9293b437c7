"""Whole runs on tiny models: what is written decodes, by the formats' own formulas, to what was meant."""

import csv
import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import convert_checkpoint
from turbomill.errors import CheckpointError, TurbomillError, UsageError
from turbomill.quant import QuantOptions, quantize

LINEARS = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
NIBBLE = [0, 4, 1, 5, 2, 6, 3, 7]


def options_of(text_file, **changes):
    fields = {"group": 32, "calib_dataset": str(text_file), "calib_samples": 8, "calib_seqlen": 64}
    return QuantOptions(**{**fields, **changes})


def decode_awq(tensors, name, group):
    """formats.md, "AWQ gemm", one value at a time over columns: w [N, K]."""

    def read(words):
        shifts = [4 * NIBBLE[j % 8] for j in range(words.shape[1] * 8)]
        return torch.stack([(words[:, j // 8] >> shifts[j]) & 15 for j in range(len(shifts))], dim=1)

    q, z = read(tensors[f"{name}.qweight"]), read(tensors[f"{name}.qzeros"])
    s = tensors[f"{name}.scales"].float()
    rows = torch.arange(q.shape[0]) // group
    return ((q - z[rows]).float() * s[rows]).T


def decode_gptq(tensors, name, bits, stored=1):
    """formats.md, "GPTQ": fields of `bits` along K (codes) and N (zeros, v1: less `stored`): w [N, K]."""

    def read(words, count):  # along dim 0
        stream = [[(int(w) & 0xFFFFFFFF) for w in column] for column in words.T.tolist()]
        out = torch.zeros(count, words.shape[1], dtype=torch.int64)
        for c, column in enumerate(stream):
            number = sum(word << (32 * i) for i, word in enumerate(column))
            out[:, c] = torch.tensor([(number >> (bits * i)) & (2**bits - 1) for i in range(count)])
        return out

    s, g_idx = tensors[f"{name}.scales"].float(), tensors[f"{name}.g_idx"].long()
    q = read(tensors[f"{name}.qweight"], len(g_idx))
    z = read(tensors[f"{name}.qzeros"].T, s.shape[1]).T + stored  # unmasked, as many readers do
    return ((q - z[g_idx]).float() * s[g_idx]).T


def decode_compressed(tensors, name, config):
    """By the library that defines the format, as its own classes read the config: w [N, K] in 16 bits."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    (group,) = QuantizationConfig.model_validate(config).config_groups.values()
    state = {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(f"{name}.")}
    return PackedQuantizationCompressor.decompress(state, group)["weight"]


def decode(path, name, options):
    """A linear of the checkpoint at `path`, fp32 [N, K], by whichever reader its config asks for."""
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "awq":
        return decode_awq(tensors, name, options.group)
    if config["quant_method"] == "gptq":
        return decode_gptq(tensors, name, options.bits, int(config["checkpoint_format"] == "gptq"))
    return decode_compressed(tensors, name, config)


def meant(monkeypatch):
    """Collect the weights each run computes with, as it writes them."""
    import turbomill.quant.run as run

    kept, write = {}, run.write_layer

    def spy(work, model, *rest):
        prefix = model.arch.layer(work.index)
        kept.update({prefix + k: v.clone() for k, v in work.module.state_dict().items()})
        write(work, model, *rest)

    monkeypatch.setattr(run, "write_layer", spy)
    return kept


@pytest.mark.parametrize(
    ("method", "changes", "model"),
    [
        ("rtn", {}, {}),
        ("rtn", {"symmetric": True}, {"tie_word_embeddings": False}),
        ("rtn", {"bits": 3}, {}),
        ("rtn", {"bits": 8}, {"dtype": torch.bfloat16}),
        ("gptq", {}, {"attention_bias": True}),
        ("gptq", {"symmetric": True, "bits": 3, "group": 64}, {"dtype": torch.bfloat16}),
        ("awq", {}, {"attention_bias": True, "mlp_bias": True}),
        ("awq", {"symmetric": True}, {"dtype": torch.bfloat16, "tie_word_embeddings": False}),
        ("awq", {"search_scale": False, "group": 64}, {"num_key_value_heads": 4}),
        ("rtn", {"format": "awq"}, {}),
        ("gptq", {"format": "awq"}, {}),
        ("awq", {"format": "gptq"}, {}),
        ("gptq", {"format": "gptq_v2"}, {}),
        ("rtn", {"format": "gptq_v2", "bits": 3, "symmetric": True}, {}),
        ("awq", {"format": "compressed-tensors"}, {"attention_bias": True}),
        ("gptq", {"format": "compressed-tensors", "symmetric": True}, {"dtype": torch.bfloat16}),
        ("rtn", {"format": "compressed-tensors", "bits": 5}, {"tie_word_embeddings": False}),
        ("gptq", {"format": "compressed-tensors", "bits": 3}, {}),
    ],
)
def test_checkpoint_decodes_to_what_was_meant(tmp_path, text_file, monkeypatch, method, changes, model):
    path = make_model(tmp_path / "m", **model)
    options = options_of(text_file, **changes)
    kept = meant(monkeypatch)
    result = quantize(path, tmp_path / "out", method, options)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(path / "model.safetensors")
    dtype = model.get("dtype", torch.float16)
    for layer in range(2):
        for linear in LINEARS:
            name = f"model.layers.{layer}.{linear}"
            assert f"{name}.weight" not in tensors
            scales = "weight_scale" if options.format == "compressed-tensors" else "scales"
            assert tensors[f"{name}.{scales}"].dtype == dtype
            decoded = decode(tmp_path / "out", name, options)
            assert torch.equal(decoded, kept[f"{name}.weight"].to(decoded.dtype)), name
            if f"{name}.bias" in before:
                assert torch.equal(tensors[f"{name}.bias"].float(), kept[f"{name}.bias"])
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert (name in tensors) == (name in before)
        if name in before:
            assert torch.equal(tensors[name], before[name])
    assert len(result.rows) == 14 and result.seconds > 0 and result.peak_bytes > 10**7
    store = convert_checkpoint(tmp_path / "out", tmp_path / "store")
    assert (store.scheme.bits, store.scheme.symmetric) == (options.bits, options.symmetric)
    down = store.linear("layers.1.w_down").dequantize()
    torch.testing.assert_close(down, kept["model.layers.1.mlp.down_proj.weight"], rtol=2**-8, atol=0)
    layout = store.tensors["layers.1.w_down.qweight"].layout
    assert layout == ("w4.n64k64" if options.bits <= 4 else "w8.n64k64")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_output_is_a_whole_checkpoint(tiny, text_file, tmp_path, method):
    out = tmp_path / "out"
    (tiny / "modeling_own.py").write_text("# custom code\n")
    generation = {"temperature": 0.3, "eos_token_id": [1, 2], "of_our_own": True}
    (tiny / "generation_config.json").write_text(json.dumps(generation))
    result = quantize(tiny, out, method, options_of(text_file))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    assert config["quantization_config"] == json.loads((out / "quantize_config.json").read_text())
    untouched = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "modeling_own.py")
    for name in (*untouched, "chat_template.jinja"):
        assert (out / name).read_bytes() == (tiny / name).read_bytes()
    made = json.loads((out / "turbomill.json").read_text())
    assert made["options"]["group"] == 32 and made["calibration"]["sha256"] == result.calibration["sha256"]
    assert made["source_fingerprint"] == open_checkpoint(tiny).fingerprint
    with (out / "quant_log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["linear"] for row in rows[:4]] == LINEARS[:4]
    assert all(float(row["loss"]) <= float(row["rtn_loss"]) for row in rows if row["fallback"] == "False")
    assert open_checkpoint(out).scheme == options_of(text_file).scheme
    assert result.disk_bytes == (out / "model.safetensors").stat().st_size
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def kl(reference, path, ids):
    with torch.no_grad():
        p = reference(ids).logits.log_softmax(-1)
        q = load_dense_model(open_checkpoint(path))(ids).logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_calibrated_methods_beat_rounding_on_calibration_like_text(tmp_path, text_file):
    path = make_model(tmp_path / "m", hidden=128, inter=256)
    reference = load_dense_model(open_checkpoint(path))
    ids = torch.tensor(open_checkpoint(path).tokenizer()(text_file.read_text())["input_ids"])[:2000].reshape(
        8, -1
    )
    found = {}
    for method in ("rtn", "awq", "gptq"):
        quantize(path, tmp_path / method, method, options_of(text_file, calib_samples=32))
        found[method] = kl(reference, tmp_path / method, ids)
    assert found["awq"] < 0.9 * found["rtn"] and found["gptq"] < 0.7 * found["rtn"], found


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_same_run_twice_is_bit_identical(tiny, text_file, tmp_path, method):
    options = options_of(text_file, batch_size=3)
    for name in ("a", "b"):
        quantize(tiny, tmp_path / name, method, options)
    a, b = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
    assert a == b


@pytest.mark.parametrize("own", ["self", "free"])
def test_self_calibration_depends_on_the_seed_alone(tiny, tmp_path, own):
    shas = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = QuantOptions(group=32, calib_dataset=own, calib_samples=4, calib_seqlen=48, seed=seed)
        shas.append(quantize(tiny, tmp_path / name, "gptq", options).calibration["sha256"])
    assert shas[0] == shas[1] != shas[2]


def test_shards(tiny, text_file, tmp_path):
    """Shards below the limit, each tensor where the index says, and the same tensors as in one file."""
    out, limit = tmp_path / "out", 30_000
    quantize(tiny, out, "awq", options_of(text_file, max_shard_bytes=limit))
    quantize(tiny, tmp_path / "whole", "awq", options_of(text_file))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    found = {}
    for file in files:
        tensors = load_file(out / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
        found |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()
    assert whole.keys() == found.keys() == index["weight_map"].keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_all_zero_group_and_layer(tiny, text_file, tmp_path, method):
    def zero(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][:, :32] = 0
        for name in tensors:
            if name.startswith("model.layers.1."):
                tensors[name].zero_()

    edit(tiny, zero)
    quantize(tiny, tmp_path / "out", method, options_of(text_file))
    state = load_dense_model(open_checkpoint(tmp_path / "out")).state_dict()
    assert all(bool(torch.isfinite(t).all()) for t in state.values())
    assert float(state["model.layers.1.mlp.down_proj.weight"].abs().max()) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused_before_calibration(tiny, text_file, tmp_path, bad, monkeypatch):
    monkeypatch.setattr("turbomill.quant.run.load_windows", lambda *a, **k: pytest.fail("calibration began"))
    name = "model.layers.1.self_attn.k_proj.weight"
    edit(tiny, lambda tensors: tensors[name].__setitem__((3, 5), bad))
    with pytest.raises(CheckpointError, match=f"{name} holds 1 NaN or inf"):
        quantize(tiny, tmp_path / "out", "gptq", options_of(text_file))
    assert not (tmp_path / "out").exists()


def test_group_that_does_not_divide_lists_all_and_what_works(tmp_path, text_file):
    path = make_model(tmp_path / "m", hidden=96, inter=192)
    with pytest.raises(UsageError) as caught:
        quantize(path, tmp_path / "out", "awq", options_of(text_file, group=128))
    message = str(caught.value)
    assert all(f"{name} K=" in message for name in LINEARS) and message.endswith("use --w-group-size 32")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("method", "form"), [("awq", "awq"), ("gptq", "gptq_v2"), ("rtn", "compressed-tensors")]
)
def test_padding_makes_the_group_divide(tmp_path, text_file, method, form):
    """K = 152 in groups of 64: named beforehand, with what works; padded, the result is that of the model."""
    path = make_model(tmp_path / "m", inter=152, hidden=128)
    options = options_of(text_file, group=64, format=form, bits=4 if form == "awq" else 8)
    with pytest.raises(UsageError, match=r"does not divide mlp\.down_proj K=152; .* use --pad"):
        quantize(path, tmp_path / "out", method, options)
    options = replace(options, pad=True)
    quantize(path, tmp_path / "out", method, options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["intermediate_size"] == 192
    name = "model.layers.1.mlp.down_proj"
    checkpoint = open_checkpoint(tmp_path / "out")
    decoded = decode(tmp_path / "out", name, options)
    assert decoded.shape == (128, 192) and not decoded[:, 152:].any()
    ids = checkpoint.tokenizer()(text_file.read_text()[:200], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        full, small = (load_dense_model(open_checkpoint(p))(ids).logits for p in (path, tmp_path / "out"))
    assert (full - small).square().mean() < 0.3 * full.var()
    store = convert_checkpoint(tmp_path / "out", tmp_path / "store")
    assert store.model["intermediate_size"] == 192


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        ({}, {"format": "awq"}, r"q_proj: AWQ gemm needs .* N=36,.*k_proj: AWQ gemm.* N=18,"),
        ({}, {"format": "gptq"}, r"q_proj: GPTQ packs into whole 32-bit words; K=64, N=36 at 4 bits"),
        ({"head_dim": 20}, {"bits": 3, "format": "gptq_v2"}, r"q_proj: GPTQ packs .* N=40 at 3 bits"),
    ],
)
def test_sizes_that_do_not_pack(tmp_path, text_file, fields, changes, words):
    """Listed before calibration, with the format that takes them; and that one does."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 18, **fields}
    path = make_model(tmp_path / "m", inter=160, **sizes)
    options = options_of(text_file, group=4, **changes)
    with pytest.raises(UsageError, match=words) as caught:
        quantize(path, tmp_path / "out", "gptq", options)
    assert str(caught.value).endswith("use --format compressed-tensors")
    options = options_of(text_file, group=4, format="compressed-tensors")
    quantize(path, tmp_path / "out", "gptq", options)
    name = "model.layers.0.self_attn.q_proj"
    linear = open_checkpoint(tmp_path / "out").linear(name)
    assert torch.equal(linear.dequantize().half(), decode(tmp_path / "out", name, options))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"format": "awq", "bits": 8},
            "--w-bits 8: awq checkpoints hold 4 bits; use --format gptq or gptq_v2",
        ),
        ({"bits": 5}, "--w-bits 5: gptq checkpoints hold 2, 3, 4, 8 bits; use --format compressed-tensors"),
        ({"format": "exl2"}, "--format exl2: expected one of awq, gptq"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tiny, text_file, tmp_path, changes, words):
    with pytest.raises(UsageError, match=words):
        quantize(tiny, tmp_path / "out", "rtn", options_of(text_file, **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 64).half()}),
            r"up_proj.weight is \[64, 64\], expected \[128, 64\]",
        ),
    ],
)
def test_missing_or_misshapen_tensor(tiny, text_file, tmp_path, change, message):
    edit(tiny, change)
    with pytest.raises(CheckpointError, match=message):
        quantize(tiny, tmp_path / "out", "awq", options_of(text_file))


def test_an_extra_tensor_comes_along(tiny, text_file, tmp_path):
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tiny, lambda tensors: tensors.update({extra: torch.arange(8.0)}))
    quantize(tiny, tmp_path / "out", "rtn", options_of(text_file))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[extra], torch.arange(8.0))


def test_little_calibration_text(tiny, tmp_path, caplog):
    few = tmp_path / "few.txt"
    few.write_text("twenty characters at least")
    caplog.set_level(logging.WARNING, "turbomill")
    logging.getLogger("turbomill").propagate = True
    for method in ("awq", "gptq"):
        result = quantize(tiny, tmp_path / method, method, options_of(few))
        assert result.calibration["windows"] == 1 and result.calibration["length"] == 26
    assert "only 26 tokens" in caplog.text


@pytest.mark.parametrize("content", ["", "   \n", "too short"])
def test_empty_or_too_short_calibration_file(tiny, tmp_path, content):
    empty = tmp_path / "empty.txt"
    empty.write_text(content)
    with pytest.raises(TurbomillError, match=r"empty\.txt") as caught:
        quantize(tiny, tmp_path / "out", "awq", options_of(empty))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_refused(tiny, text_file, tmp_path):
    quantize(tiny, tmp_path / "out", "rtn", options_of(text_file))
    with pytest.raises(CheckpointError, match="already quantized"):
        quantize(tmp_path / "out", tmp_path / "again", "rtn", options_of(text_file))


def test_work_dir_of_somebody_else_is_left_alone(tiny, text_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="--overwrite"):
        quantize(tiny, out, "rtn", options_of(text_file))
    quantize(tiny, out, "rtn", options_of(text_file, overwrite=True))
    assert not (out / "thesis.tex").exists()
    quantize(tiny, out, "rtn", options_of(text_file, group=64))  # our own earlier result may be replaced
    assert open_checkpoint(out).scheme.group == 64


def test_nothing_is_left_when_a_run_fails(tiny, text_file, tmp_path, monkeypatch):
    def fail(*_args):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr("turbomill.quant.run.write_log", fail)
    with pytest.raises(RuntimeError):
        quantize(tiny, tmp_path / "out", "rtn", options_of(text_file))
    assert not any("out" in p.name for p in tmp_path.iterdir())


def test_a_stage_that_got_worse_falls_back_and_says_so(tiny, text_file, tmp_path, monkeypatch, caplog):
    import turbomill.quant.layer as layer

    solve = layer.round_columns

    def worse(weight, hessian, grid, damping):
        solved = solve(weight, hessian, grid, damping)
        return type(solved)(torch.zeros_like(solved.codes), solved.grid)

    monkeypatch.setattr(layer, "round_columns", worse)
    logging.getLogger("turbomill").propagate = True
    # Without the correction for drifted inputs, which changes what is rounded.
    options = options_of(text_file, correct=False)
    result = quantize(tiny, tmp_path / "gptq", "gptq", options)
    assert result.fallbacks == 14 and all(row.method == "rtn" for row in result.rows)
    assert "rounded to nearest" in caplog.text
    quantize(tiny, tmp_path / "rtn", "rtn", options_of(text_file))
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("gptq", "rtn"))
    assert all(torch.equal(a[name], b[name]) for name in a)
