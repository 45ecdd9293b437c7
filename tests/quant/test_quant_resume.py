"""A run killed at any moment is gone on with by the same command, to the same bits; another is refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from architectures import CASES
from test_quant_run import edit, options_of
from tiny_models import byte_tokenizer, make_model

from turbomill.convert.staged import ResumableDirectory
from turbomill.convert.writer import CheckpointWriter
from turbomill.errors import CheckpointError, TurbomillError, UsageError
from turbomill.quant import quantize
from turbomill.quant import run as run_module
from turbomill.quant.recipe import RECIPES

LAYERS = 4


def weights_of(path):
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors*")}


def stop_at(monkeypatch, count, error=KeyboardInterrupt):
    """Make the writer raise when it is given its `count`-th tensor."""
    add, calls = CheckpointWriter.add, []

    def stopping(self, name, tensor):
        calls.append(name)
        if len(calls) == count:
            raise error
        add(self, name, tensor)

    monkeypatch.setattr(CheckpointWriter, "add", stopping)


def layers_of(path):
    journal = path.parent / f".{path.name}.partial" / ResumableDirectory.JOURNAL
    return len(journal.read_text().splitlines()) - 1


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", num_hidden_layers=LAYERS, attention_bias=True)


@pytest.mark.parametrize("method", list(RECIPES))
def test_every_method_goes_on_to_the_same_bits(model, text_file, tmp_path, monkeypatch, method, caplog):
    options = options_of(text_file, max_shard_bytes=60_000, batch_size=3)
    whole = quantize(model, tmp_path / "whole", method, options)
    for count in (60, 50):  # in layer 1, in layer 2 (which the second run begins at 35)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_at(patch, count)
            quantize(model, tmp_path / "out", method, options)
        assert not (tmp_path / "out").exists()
    assert 0 < layers_of(tmp_path / "out") < LAYERS
    result = quantize(model, tmp_path / "out", method, options)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")
    assert len(weights_of(tmp_path / "out")) > 3
    same = [[replace(row, seconds=0) for row in run.rows] for run in (result, whole)]
    assert same[0] == same[1]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )


def test_mixed_precision_goes_on_with_the_same_schemes(model, text_file, tmp_path, monkeypatch):
    options = options_of(text_file, budget=5.5)
    quantize(model, tmp_path / "whole", "auto", options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run_module_commits(patch, 3)
        quantize(model, tmp_path / "out", "auto", options)
    assert layers_of(tmp_path / "out") == 2
    with pytest.raises(UsageError, match=r"option budget \(5\.5 there, 5\.0 here\)"):
        quantize(model, tmp_path / "out", "auto", replace(options, budget=5.0))
    quantize(model, tmp_path / "out", "auto", options)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "whole")]
    assert configs[0] == configs[1] and len(configs[0]["quantization_config"]["config_groups"]) > 1


@pytest.mark.parametrize("name", ["internlm2", "qwen2-moe", "mixtral", "gemma2"])
def test_other_architectures_go_on_too(name, text_file, tmp_path, monkeypatch):
    CASES[name].make(tmp_path / "model", torch.bfloat16)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = options_of(text_file, format="compressed-tensors")
    quantize(tmp_path / "model", tmp_path / "whole", "awq", options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run_module_commits(patch, 3)
        quantize(tmp_path / "model", tmp_path / "out", "awq", options)
    assert layers_of(tmp_path / "out") == 2
    quantize(tmp_path / "model", tmp_path / "out", "awq", options)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


def run_module_commits(patch, count):
    """Interrupt right after the `count`-th part was recorded."""
    commit, calls = CheckpointWriter.commit, []

    def stopping(self, entry):
        commit(self, entry)
        calls.append(entry)
        if len(calls) == count:
            raise KeyboardInterrupt

    patch.setattr(CheckpointWriter, "commit", stopping)


def command(model, out, text):
    options = ("--w-group-size", "32", "--calib-samples", "8", "--calib-seqlen", "64", "--format", "awq")
    given = (str(model), "--work-dir", str(out), "--calib-dataset", str(text), *options)
    return [sys.executable, "-m", "turbomill", "lite", "auto_gptq", *given]


@pytest.mark.slow
def test_a_process_killed_at_random_moments(tmp_path, text_file):
    """SIGKILL to the real command, at moments that chance picks, until it comes through."""
    model = make_model(tmp_path / "model", num_hidden_layers=6, hidden=128, inter=256)
    partial, rng, kills = tmp_path / ".out.partial", random.Random(int.from_bytes(os.urandom(4), "big")), 0
    subprocess.run(command(model, tmp_path / "whole", text_file), check=True, capture_output=True)
    for _attempt in range(40):
        process = subprocess.Popen(
            command(model, tmp_path / "out", text_file), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        known = layers_of(tmp_path / "out") if (partial / ResumableDirectory.JOURNAL).exists() else -1
        # Wait for work to be seen to go on, then a random while.
        while process.poll() is None and (
            not (partial / ResumableDirectory.JOURNAL).exists() or layers_of(tmp_path / "out") <= known
        ):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        if kills < 4 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, log = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, log.decode()
        assert not (tmp_path / "out").exists()
    assert kills > 0 and weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


def test_ctrl_c_keeps_the_work_and_says_how_to_go_on(model, text_file, tmp_path, monkeypatch, caplog):
    import logging

    logging.getLogger("turbomill").propagate = True
    stop_at(monkeypatch, 60)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", "gptq", options_of(text_file))
    assert f"1 of {LAYERS} layers are kept in {tmp_path / '.out.partial'}; the same command" in caplog.text


def interrupted(model, text_file, tmp_path, monkeypatch, options):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 60)
        quantize(model, tmp_path / "out", "gptq", options)


def test_other_options_model_or_data_are_refused_by_name(model, text_file, tmp_path, monkeypatch):
    options = options_of(text_file)
    interrupted(model, text_file, tmp_path, monkeypatch, options)
    # None of them may get as far as reading every weight or the calibration text, apart from the last.
    monkeypatch.setattr(run_module, "check_finite", lambda *_: pytest.fail("work began"))
    for changed, words in (
        (replace(options, group=64), r"another option group \(32 there, 64 here\)"),
        (replace(options, bits=3), r"option bits \(4 there, 3 here\)"),
        (replace(options, damping=0.02), r"option damping \(0\.01 there, 0\.02 here\)"),
        (replace(options, max_shard_bytes=9999), "option max_shard_bytes"),
        (replace(options, format="gptq_v2"), "option format"),
    ):
        with pytest.raises(UsageError, match=words) as error:
            quantize(model, tmp_path / "out", "gptq", changed)
        assert "--overwrite" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"another method \(gptq there, awq here\)"):
        quantize(model, tmp_path / "out", "awq", options)
    text = text_file.read_text()
    text_file.write_text(text[::-1])
    with pytest.raises(UsageError, match="another calibration data"):
        quantize(model, tmp_path / "out", "gptq", options)
    text_file.write_text(text)
    edit(model, lambda tensors: tensors["model.layers.3.mlp.up_proj.weight"].mul_(2))
    with pytest.raises(UsageError, match="another model"):
        quantize(model, tmp_path / "out", "gptq", options)


def test_overwrite_starts_another_run_anew_and_goes_on_with_the_same(
    model, text_file, tmp_path, monkeypatch, caplog
):
    options = options_of(text_file, overwrite=True)
    interrupted(model, text_file, tmp_path, monkeypatch, options)
    quantize(model, tmp_path / "whole", "gptq", options)
    read = []
    original = run_module._Layers._replay
    monkeypatch.setattr(run_module._Layers, "_replay", lambda self, i: (read.append(i), original(self, i)))
    quantize(model, tmp_path / "out", "gptq", options)
    assert read == [0] and weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")
    interrupted(model, text_file, tmp_path, monkeypatch, options)
    read.clear()
    other = replace(options, group=64)
    quantize(model, tmp_path / "out", "gptq", other)
    assert read == []
    made = json.loads((tmp_path / "out" / "turbomill.json").read_text())
    assert made["options"]["group"] == 64


def test_a_full_disk_keeps_what_is_done(model, text_file, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError):
        stop_at(patch, 110, OSError(28, "No space left on device"))
        quantize(model, tmp_path / "out", "rtn", options_of(text_file))
    assert layers_of(tmp_path / "out") > 0
    quantize(model, tmp_path / "out", "rtn", options_of(text_file))
    quantize(model, tmp_path / "whole", "rtn", options_of(text_file))
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_model_whose_forward_gives_nan(model, text_file, tmp_path, method):
    """Finite weights, activations beyond fp32: named, not calibrated on."""
    edit(
        model,
        lambda tensors: [
            tensors.update({name: tensor.bfloat16() * 1e30})
            for name, tensor in tensors.items()
            if name.startswith("model.layers.1.mlp")
        ],
    )
    with pytest.raises(TurbomillError, match=r"layer 1 mlp\.down_proj: its inputs are NaN or inf") as error:
        quantize(model, tmp_path / "out", method, options_of(text_file))
    assert not isinstance(error.value, CheckpointError) and "\n" not in str(error.value)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
