"""Odd models and odd calibration text: each gives the right result, or one line that says what is wrong."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_quant_run import decode, edit, options_of
from tiny_models import make_model

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import convert_checkpoint
from turbomill.errors import CheckpointError
from turbomill.quant import QuantOptions, quantize
from turbomill.quant.calibrate import calibrate
from turbomill.quant.decoder import StreamedDecoder, watching


def statistics(path, out, text, **changes):
    options = QuantOptions(calib_dataset=str(text), **{"calib_samples": 7, "calib_seqlen": 40, **changes})
    result = calibrate(path, out, options)
    return load_file(out / "calibration.safetensors"), result


def test_every_token_is_counted_once_whatever_the_batches(tmp_path, text_file):
    path = make_model(tmp_path / "m", torch.float32)
    expected, result = statistics(path, tmp_path / "1", text_file, batch_size=1)
    assert json.loads((tmp_path / "1" / "calibration.json").read_text())["tokens"] == 7 * 40
    assert result.calibration["windows"] == 7
    for batch in (2, 3, 7, 50):  # whole batches and a last one that is not full
        tensors, _ = statistics(path, tmp_path / str(batch), text_file, batch_size=batch)
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_batches_of_different_lengths(tmp_path):
    """Nothing is padded: each batch sees its own positions and mask."""
    checkpoint = open_checkpoint(make_model(tmp_path / "m", torch.float32))
    model, decoder = load_dense_model(checkpoint), StreamedDecoder(checkpoint)
    batches = [torch.randint(0, 256, shape) for shape in ((2, 70), (1, 33), (3, 1), (2, 34))]
    hidden = decoder.embed(batches)
    seen, layer = [], decoder.load(0)
    with watching(layer, {"mlp.down_proj": lambda x, _y: seen.append(x.reshape(-1, 128))}):
        hidden = [decoder.run(layer, 0, batch) for batch in hidden]
    assert [len(x) for x in seen] == [140, 33, 3, 68]
    hidden = [decoder.run(decoder.load(1), 1, batch) for batch in hidden]
    for ids, found in zip(batches, hidden, strict=True):
        with torch.no_grad():
            expected = model(ids).logits
            logits = model.lm_head(model.model.norm(found))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_samples_longer_than_the_limit_are_cut(tiny, tmp_path, text_file):
    """Documents of 2,000 tokens, windows of 32; and windows are never longer than the model's positions."""
    lines = [json.dumps({"text": text_file.read_text()[i : i + 2000]}) for i in (0, 2000, 4000)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    result = quantize(
        tiny, tmp_path / "a", "gptq", options_of(tmp_path / "long.jsonl", calib_samples=5, calib_seqlen=32)
    )
    assert (result.calibration["windows"], result.calibration["length"]) == (5, 32)
    result = quantize(tiny, tmp_path / "b", "gptq", options_of(text_file, calib_samples=2, calib_seqlen=2048))
    assert (result.calibration["windows"], result.calibration["length"]) == (2, 256)


def test_far_fewer_tokens_than_inputs(tmp_path):
    """26 tokens against K = 512: the Gram matrix has little rank, the result is finite and not worse than
    rounding on those tokens."""
    path = make_model(tmp_path / "m", hidden=256, inter=512)
    (tmp_path / "few.txt").write_text("twenty characters at least")
    for method in ("awq", "gptq"):
        result = quantize(path, tmp_path / method, method, options_of(tmp_path / "few.txt", group=128))
        assert all(row.loss <= row.rtn_loss or row.fallback for row in result.rows)
        state = load_dense_model(open_checkpoint(tmp_path / method)).state_dict()
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def test_a_tokenizer_without_a_pad_token(tiny, text_file, tmp_path):
    assert open_checkpoint(tiny).tokenizer().pad_token is None
    assert quantize(tiny, tmp_path / "out", "awq", options_of(text_file, batch_size=3)).fallbacks == 0


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("stored", [False, True])
def test_tied_embeddings(tiny, text_file, tmp_path, method, stored):
    """With and without the head in the file: it stays what the embedding is, and unquantized."""
    head = "lm_head.weight"
    if stored:
        edit(tiny, lambda tensors: tensors.update({head: tensors["model.embed_tokens.weight"].clone()}))
    quantize(tiny, tmp_path / "out", method, options_of(text_file))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (head in tensors) == stored
    if stored:
        assert torch.equal(tensors[head], tensors["model.embed_tokens.weight"])
    store = convert_checkpoint(tmp_path / "out", tmp_path / "store")
    assert store.model["tie_word_embeddings"] and "output.weight" not in store.tensors


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_outside_the_layers(tmp_path, text_file, name):
    """It would not be needed to quantize, but the result could not be used."""
    path = make_model(tmp_path / "m", tie_word_embeddings=False)
    edit(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{name} missing"):
        quantize(path, tmp_path / "out", "rtn", options_of(text_file))


def test_an_unknown_tensor_comes_along_and_is_named(tiny, text_file, tmp_path, caplog):
    extra = ("model.layers.1.mlp.side.weight", "model.vision.weight")
    edit(tiny, lambda tensors: tensors.update({name: torch.ones(3) for name in extra}))
    logging.getLogger("turbomill").propagate = True
    quantize(tiny, tmp_path / "out", "gptq", options_of(text_file))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensors[name], torch.ones(3)) for name in extra)
    assert "mlp.side.weight" in caplog.text and "model.vision.weight" in caplog.text


@pytest.mark.parametrize(
    ("kv_heads", "form"),
    [(1, "compressed-tensors"), (2, "awq"), (2, "compressed-tensors"), (4, "gptq"), (8, "gptq_v2")],
)
def test_sizes_that_fill_no_tile(tmp_path, text_file, kv_heads, form):
    """N = 12 (not a multiple of 8), 24 (not of 32), 160 and 96 (not of 64)."""
    path = make_model(
        tmp_path / "m", hidden=96, inter=160, num_attention_heads=8, head_dim=12, num_key_value_heads=kv_heads
    )
    options = options_of(text_file, format=form)
    quantize(path, tmp_path / "out", "awq", options)
    parts = [decode(tmp_path / "out", f"model.layers.1.self_attn.{part}_proj", options) for part in "qkv"]
    store = convert_checkpoint(tmp_path / "out", tmp_path / "store")
    assert store.tensors["layers.1.w_qkv.qweight"].layout == "w4.n64k64"
    fused = store.linear("layers.1.w_qkv").dequantize()
    torch.testing.assert_close(fused.half(), torch.cat(parts).half(), rtol=0, atol=0)


def test_scaled_weights_beyond_fp16(tmp_path, text_file):
    """Weights near fp16's limit: a scale that takes W * s or the grid's scale beyond it is not chosen."""
    path = make_model(tmp_path / "m")

    def huge(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                tensor.copy_(tensor.sign() * 60000)
                tensor[:, 5] = 1e-3
            if name.endswith("post_attention_layernorm.weight"):
                tensor.mul_(1e-4)

    edit(path, huge)
    for method in ("awq", "gptq", "rtn"):
        quantize(path, tmp_path / method, method, options_of(text_file))
        tensors = load_file(tmp_path / method / "model.safetensors")
        assert all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
        with torch.no_grad():
            ids = torch.arange(60)[None]
            assert bool(
                torch.isfinite(load_dense_model(open_checkpoint(tmp_path / method))(ids).logits).all()
            )


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_zeros_of_nought(tmp_path, text_file, method):
    """Weights that are all positive put the zero at 0: v2 stores it, v1's grid has none, and both decode."""
    path = make_model(tmp_path / "m")
    names = [f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "down")]
    edit(path, lambda tensors: [tensors[f"{name}.weight"].abs_() for name in names])
    weights = load_file(path / "model.safetensors")
    for form in ("gptq", "gptq_v2", "awq", "compressed-tensors"):
        options = options_of(text_file, format=form)
        quantize(path, tmp_path / form, method, options)
        checkpoint = open_checkpoint(tmp_path / form)
        for name in names:
            linear = checkpoint.linear(name)
            assert int(linear.zeros.min()) == (1 if form == "gptq" else 0)
            decoded = decode(tmp_path / form, name, options)
            assert torch.equal(decoded.half(), linear.dequantize().half())
            error = (decoded.float() - weights[f"{name}.weight"].float()).square().mean().sqrt()
            assert error < 0.2 * weights[f"{name}.weight"].float().square().mean().sqrt()


def test_sharded_sources(tiny, text_file, tmp_path):
    """From several files with an index, and from one: the same result."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float16)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")
    open_checkpoint(tiny).tokenizer().save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    for path, name in ((tiny, "a"), (sharded, "b")):
        quantize(path, tmp_path / name, "awq", options_of(text_file))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_inf_outside_the_layers_is_refused(tiny, text_file, tmp_path):
    edit(tiny, lambda tensors: tensors["model.norm.weight"].__setitem__(3, float("-inf")))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 1 NaN or inf"):
        quantize(tiny, tmp_path / "out", "rtn", options_of(text_file))


def test_infinities_that_cancel_are_found(tiny, text_file, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(tiny, lambda tensors: tensors[name].view(-1)[:2].copy_(torch.tensor([float("inf"), float("-inf")])))
    with pytest.raises(CheckpointError, match=f"{name} holds 2 NaN or inf"):
        quantize(tiny, tmp_path / "out", "rtn", options_of(text_file))


@pytest.mark.parametrize(
    ("method", "form"), [("rtn", "gptq"), ("awq", "awq"), ("gptq", "compressed-tensors"), ("gptq", "gptq_v2")]
)
def test_one_group_for_all_of_k(tiny, text_file, tmp_path, method, form):
    """Group -1: a scale for each output channel, whatever K is; every format holds it, and it converts."""
    options = options_of(text_file, group=-1, format=form)
    quantize(tiny, tmp_path / "out", method, options)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.scheme.group == -1
    source = load_file(tiny / "model.safetensors")
    for name, k in (("mlp.down_proj", 128), ("self_attn.q_proj", 64)):
        full = f"model.layers.1.{name}"
        linear = checkpoint.linear(full)
        assert linear.scheme.group == k and linear.scales.shape[0] == 1
        whole = replace(options, group=k)  # how the reader of AWQ is told
        assert torch.equal(decode(tmp_path / "out", full, whole).half(), linear.dequantize().half())
        if method == "rtn":
            weight = source[f"{full}.weight"].float()
            assert (linear.dequantize() - weight).abs().max() <= linear.scales.float().max() * 0.51
    store = convert_checkpoint(tmp_path / "out", tmp_path / "store")
    down = checkpoint.linear("model.layers.1.mlp.down_proj").dequantize()
    assert torch.equal(store.linear("layers.1.w_down").dequantize(), down)
