"""The real model: AWQ and GPTQ lose clearly less than rounding to nearest."""

from pathlib import Path

import pytest
from quality import compare

from turbomill.calib_data import load_windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.rewrite import rewrite_checkpoint
from turbomill.quant import QuantOptions, quantize

LAYERS = 2  # enough to tell the methods apart, in under a minute


def first_layers(dst: Path) -> Path:
    """The demo model cut off after a few layers: real weights, real activations."""
    checkpoint = open_checkpoint("demo")
    names = checkpoint.names()
    kept = [n for n in names if not n.startswith("model.layers.") or int(n.split(".")[2]) < LAYERS]
    checkpoint.config = {**checkpoint.config, "num_hidden_layers": LAYERS}
    checkpoint.names = lambda: kept  # type: ignore[method-assign]
    return rewrite_checkpoint(checkpoint, dst, "hf")


@pytest.mark.demo_model
@pytest.mark.slow
def test_awq_and_gptq_beat_rounding_on_the_demo_model(tmp_path):
    model = first_layers(tmp_path / "model")
    options = QuantOptions(group=64, calib_samples=8, calib_seqlen=512)
    methods = ("rtn", "awq", "gptq")
    paths = [tmp_path / method for method in methods]
    for method, path in zip(methods, paths, strict=True):
        result = quantize(model, path, method, options)  # type: ignore[arg-type]
        assert result.fallbacks == 0
    windows = load_windows("builtin", open_checkpoint("demo").tokenizer(), 2, 512, split="evaluation").ids
    rtn, awq, gptq = compare(model, paths, windows)
    assert awq["kl"] < 0.7 * rtn["kl"], (rtn, awq)
    assert gptq["kl"] < 0.6 * rtn["kl"], (rtn, gptq)
