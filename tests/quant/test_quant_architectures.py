"""Quantization of what transformers can run: layer by layer it is the whole model, AWQ's folding changes
nothing but what rounding does, and what is written converts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from architectures import CASES, Case
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer

import turbomill.quant.layer as layer_module
from turbomill.calib_data import load_windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.runnable import runnable
from turbomill.convert.store import convert_checkpoint
from turbomill.quant import QuantOptions, awq, quantize
from turbomill.quant.decoder import StreamedDecoder
from turbomill.quant.grid import Grid, GridSpec, Quantized
from turbomill.quant.layer import LayerWork
from turbomill.quant.recipe import RECIPES
from turbomill.quant.stages import FEW_TOKENS, calibrate_layer, plan_layer
from turbomill.quant.stream import Stream

ALL = [name for name in CASES if name not in ("phi3-short", "qwen2", "mistral")]


def options_of(text_file: Path, **changes) -> QuantOptions:
    fields = {"group": 32, "calib_dataset": str(text_file), "calib_samples": 4, "calib_seqlen": 64}
    return QuantOptions(**{**fields, **changes})


@pytest.mark.parametrize("name", ALL)
def test_layer_by_layer_is_the_whole_model(name, tmp_path):
    model = CASES[name].make(tmp_path / "model")
    ids = torch.randint(3, 320, (2, 150 if name == "phi3-long" else 70))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    decoder = StreamedDecoder(runnable(open_checkpoint(tmp_path / "model")))
    (hidden,) = decoder.embed([ids])
    torch.testing.assert_close(hidden, expected[0])
    for index in range(decoder.num_layers - 1):  # the last of transformers' states is behind the final norm
        hidden = decoder.run(decoder.load(index), index, hidden)
        torch.testing.assert_close(hidden, expected[index + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_awq_folds_scales_without_changing_the_model(name, tmp_path, text_file):
    """A scale that went into a linear but not into its norm (or into a norm without its offset) moves the
    logits by more than rounding does."""
    CASES[name].make(tmp_path / "model", torch.float16)
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    for key, tensor in state.items():  # a few large channels, as real models have: they get large scales
        if "input_layernorm" in key or "feedforward_layernorm" in key:
            tensor.copy_(torch.exp(torch.randn(tensor.shape)) - (1 if name == "gemma2" else 0))
    save_file(state, file, {"format": "pt"})
    byte_tokenizer().save_pretrained(tmp_path / "model")
    model = load_dense_model(open_checkpoint(tmp_path / "model"))
    ids = torch.randint(3, 256, (1, 60))
    errors = {}
    for method in ("rtn", "awq"):
        quantize(tmp_path / "model", tmp_path / method, method, options_of(text_file))
        checkpoint = open_checkpoint(tmp_path / method)
        with torch.no_grad():
            errors[method] = (load_dense_model(checkpoint)(ids).logits - model(ids).logits).square().mean()
    assert errors["awq"] < 1.5 * errors["rtn"]
    assert convert_checkpoint(tmp_path / "awq", tmp_path / "store").scheme is not None


class Exact(Quantized):
    """The weight itself as codes, on a grid of one step per output channel."""

    def weight(self):
        return self.codes * self.grid.scales[:, :1]

    def compact(self):
        return self


@pytest.fixture
def without_rounding(monkeypatch):
    """A quantizer that changes nothing, and scales that certainly move: random ones for every group."""

    def ones(w, *_hessian_and_spec):
        return Grid(torch.ones(w.shape[0], 1), torch.zeros(w.shape[0], 1), GridSpec(SCHEME, torch.float32))

    def scales(w, stats, spec, share, search):
        return torch.rand(int(share.max()) + 1) * 3 + 0.3

    monkeypatch.setattr(awq, "search_scale", scales)
    monkeypatch.setattr(layer_module, "_rtn", lambda w, _spec: Exact(torch.full_like(w, 1e3), ones(w)))
    for name in ("clipped_grid", "searched_grid", "minmax_grid"):
        monkeypatch.setattr(layer_module, name, ones)
    monkeypatch.setattr(layer_module, "Quantized", Exact)
    monkeypatch.setattr("turbomill.quant.smooth.Quantized", Exact)
    monkeypatch.setattr(Grid, "codes", lambda self, w: w.clone())


SCHEME = QuantScheme(4, 32, False)
# Norms, and linears before and after: how many tensors of a layer move at least.
LLAMA_KINDS = (
    "input_layernorm",
    "post_attention_layernorm",
    "q_proj",
    "o_proj",
    "v_proj",
    "up_proj",
    "down_proj",
)
MOVED = {
    "gemma": ("input_layernorm", "pre_feedforward_layernorm", *LLAMA_KINDS[2:]),
    "phi3": ("input_layernorm", "post_attention_layernorm", "qkv_proj", "gate_up_proj"),
    "glm": ("input_layernorm", "post_attention_layernorm", "q_proj", "v_proj", "o_proj", "gate_up_proj"),
    "mixtral": ("input_layernorm", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "qwen3-moe": ("input_layernorm", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "qwen2-moe": ("input_layernorm", "q_proj", "v_proj", "o_proj", "up_proj", "shared_expert.up_proj"),
}


@pytest.mark.parametrize("name", ["llama", *ALL])
def test_smoothing_changes_nothing_in_full_precision(name, tmp_path, without_rounding):
    """AWQ's scales and folds leave the logits as they were, and do move weights."""
    case = CASES[name] if name in CASES else Case("LlamaForCausalLM", "llama", {"attention_bias": True})
    model = case.make(tmp_path / "model")
    run = runnable(open_checkpoint(tmp_path / "model"))
    ids = torch.randint(3, 320, (4, 110))
    with torch.no_grad():
        before = model(ids).logits
    decoder = StreamedDecoder(run)
    stream = Stream(decoder, decoder.embed(ids.split(2)))
    moved, norms = set(), set()
    for index in range(decoder.num_layers):
        work = LayerWork(
            index,
            decoder.load(index),
            lambda _name: GridSpec(SCHEME, torch.float32),
            int(run.arch.model_config(run.config)["head_dim"]),
            lambda _name: torch.float32,  # nothing is rounded
            run.arch.norm_offset,
        )
        original = {key: tensor.clone() for key, tensor in work.module.state_dict().items()}
        stream.enter(work.module, index)
        plan = plan_layer(run.arch, run.config, index)
        calibrate_layer(work, plan, [stream], RECIPES["awq"], options_of(tmp_path))
        stream.leave()
        assert not any(row.fallback for row in work.rows)
        assert {row.linear for row in work.rows} == set(run.arch.linears_of(run.config, index))
        changed = {key for key, t in work.module.state_dict().items() if not torch.equal(t, original[key])}
        moved |= {kind for kind in moved_kinds(name) if any(kind in key for key in changed)}
        norms |= {key for key in changed if "router" in key or key.endswith("mlp.gate.weight")}
        model.get_decoder().layers[index] = work.module
    assert moved == set(moved_kinds(name)) and not norms
    with torch.no_grad():
        after = model(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def moved_kinds(name):
    return next((kinds for prefix, kinds in MOVED.items() if name.startswith(prefix)), LLAMA_KINDS)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *[(name, "awq") for name in ("internlm2", "baichuan2", "mixtral", "qwen2-moe")],
        *[("baichuan", "gptq"), ("qwen3-moe", "gptq"), ("mixtral", "rtn"), ("internlm2", "rtn")],
    ],
)
def test_every_model_is_quantized_in_its_own_names(name, method, tmp_path, text_file):
    """The checkpoint converts, has the original's unquantized tensors, and is as near to it as its bits
    allow."""
    CASES[name].make(tmp_path / "model", torch.float16)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    changes = {"format": "awq"} if method == "awq" else {"format": "gptq_v2", "bits": 8}
    options = options_of(text_file, calib_samples=8, **changes)
    result = quantize(tmp_path / "model", tmp_path / "out", method, options)
    before, after = open_checkpoint(tmp_path / "model"), open_checkpoint(tmp_path / "out")
    assert after.config["architectures"] == before.config["architectures"]
    linears = before.arch.linear_prefixes(before.config)
    assert all(isinstance(after.linear(prefix), QuantLinear) for prefix in linears)
    for tensor in before.names():
        if "norm" not in tensor and tensor.rpartition(".")[0] not in linears:
            assert torch.equal(after.tensor(tensor), before.tensor(tensor)), tensor
    ids = before.tokenizer()(text_file.read_text()[:120], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        full, small = (load_dense_model(one)(ids).logits for one in (before, after))
    assert (full - small).square().mean() < (0.6 if method == "awq" else 0.05) * full.var()
    assert convert_checkpoint(tmp_path / "out", tmp_path / "store").scheme is not None
    assert len(result.rows) >= len(linears)


def test_a_fused_qkv_with_bias_under_awq(tmp_path, text_file):
    """InternLM2: the bias of v is divided with its rows, in the order that the model has them."""
    CASES["internlm2"].make(tmp_path / "model", torch.float16)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "out", "awq", options_of(text_file))
    name = "model.layers.0.attention.wqkv"
    before, after = (runnable(open_checkpoint(tmp_path / path)) for path in ("model", "out"))
    old, new = (one.published.tensor(f"{name}.bias") for one in (before, after))
    assert new.shape == old.shape and not torch.equal(new, old)
    for part in "qk":  # nothing is folded into them
        bias = f"model.layers.0.self_attn.{part}_proj.bias"
        assert torch.equal(before.tensor(bias), after.tensor(bias))


def test_experts_see_the_tokens_that_are_sent_to_them(tmp_path, text_file, caplog):
    """Each row counts its expert's tokens; an expert without enough is rounded, not scaled, and named."""
    case = CASES["qwen3-moe"]
    case.make(tmp_path / "model", torch.float16)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    router = state["model.layers.1.mlp.gate.weight"]  # [E, H]
    router[5:] = router[:3]  # equal logits: top-k takes the first, so 5, 6 and 7 are chosen only beside them
    router[7] = 0
    save_file(state, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    seen = {}
    model = case.reference(tmp_path / "model", None)
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _m, args: seen.setdefault("chosen", []).append(args[1]))
    options = options_of(text_file, calib_samples=6)
    checkpoint = open_checkpoint(tmp_path / "model")
    windows = load_windows(str(text_file), checkpoint.tokenizer(), 6, 64)
    with torch.no_grad():
        model(windows.ids)
    logging.getLogger("turbomill").propagate = True
    result = quantize(tmp_path / "model", tmp_path / "out", "awq", options)
    chosen = torch.cat(seen["chosen"])  # layer 0: its attention alone is quantized before
    counts = torch.bincount(chosen.flatten(), minlength=8)
    rows = {(row.layer, row.linear): row for row in result.rows}
    for expert, count in enumerate(counts.tolist()):
        found = rows[0, f"mlp.experts.{expert}.gate_proj"].tokens
        assert abs(found - count) <= max(8, 0.25 * count)
    total = sum(rows[0, f"mlp.experts.{expert}.up_proj"].tokens for expert in range(8))
    assert total == 6 * 64 * 3
    few = [row for row in result.rows if row.tokens is not None and row.tokens < FEW_TOKENS]
    assert all(row.method == "rtn" and row.fallback and row.loss is None for row in few)
    few_experts = {(row.layer, row.linear.split(".")[2]) for row in few}
    if few:
        assert "fewer than 32 calibration tokens chose experts" in caplog.text
    made = json.loads((tmp_path / "out" / "turbomill.json").read_text())
    for layer, expert in few_experts:
        assert f"layer {layer} mlp.experts.{expert}.down_proj" in made["fallbacks"]
    assert few_experts
