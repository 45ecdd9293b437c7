"""`turbomill lite`: options, both spellings, machine output, one-line errors and exit codes."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model

from turbomill.__main__ import main
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model


def turbomill(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["turbomill", *map(str, args)])
    try:
        main()
    except SystemExit as done:
        return done.code
    return 0


@pytest.mark.parametrize(
    ("command", "extra", "method", "scheme"),
    [
        ("rtn", ("--w_bits", 8, "--w_group_size", 32), "rtn", "w8g32asym"),
        ("auto_awq", ("--w-group-size", 64, "--search_scale"), "awq", "w4g64asym"),
        ("auto-gptq", ("--w-group-size", 32, "--w-sym", "--batch_size", 2), "gptq", "w4g32sym"),
        ("rtn", ("--format", "compressed_tensors", "--w-bits", 6, "--w-group-size", 32), "rtn", "w6g32asym"),
        ("auto_gptq", ("--format", "gptq_v2", "--w-group-size", 32), "gptq", "w4g32asym"),
        ("auto", (), "auto", "w4g64asym"),  # the largest group that divides K = 64 and 128
    ],
)
def test_quantizing_commands(monkeypatch, capsys, tiny, text_file, tmp_path, command, extra, method, scheme):
    out = tmp_path / "out"
    calibration = (
        () if method == "rtn" else ("--calib-dataset", text_file, "--calib-samples", 4, "--calib_seqlen", 64)
    )
    assert (
        turbomill(monkeypatch, "lite", command, tiny, "--work-dir", out, *extra, *calibration, "--json") == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == method and result["scheme"] == scheme and result["work_dir"] == str(out)
    assert len(result["rows"]) == 14 and result["disk_bytes"] > 0
    assert str(open_checkpoint(out).scheme) == scheme
    assert " ".join(map(str, ["turbomill", "lite", command, tiny])) in (out / "turbomill.json").read_text()


def test_calibrate_measures_what_the_model_computes(monkeypatch, capsys, tmp_path, text_file):
    path = make_model(tmp_path / "m", torch.float32)
    out = tmp_path / "stats"
    args = ("--work-dir", out, "--calib-dataset", text_file, "--calib-samples", 3, "--calib-seqlen", 50)
    assert turbomill(monkeypatch, "lite", "calibrate", path, *args, "--batch-size", 2, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert len(summary["linears"]) == 14 and summary["calibration"]["windows"] == 3
    tensors = load_file(out / "calibration.safetensors")

    checkpoint = open_checkpoint(path)
    ids = torch.tensor(checkpoint.tokenizer()(text_file.read_text())["input_ids"])
    ids = torch.stack([ids[i * (len(ids) // 3) :][:50] for i in range(3)])
    model, seen = load_dense_model(checkpoint), {}
    for name in ("model.layers.1.mlp.down_proj", "model.layers.1.self_attn.k_proj"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _m, args, out, name=name: seen.update({name: (args[0], out)}))
    with torch.no_grad():
        model(ids)
    for name, (x, y) in seen.items():
        x = x.reshape(150, -1)
        for kind, expected in {
            "absmean": x.abs().mean(0), "absmax": x.abs().amax(0), "mean_square": x.square().mean(0),
        }.items():  # fmt: skip
            torch.testing.assert_close(tensors[f"{name}.input.{kind}"], expected, rtol=1e-4, atol=1e-5)
        if name.endswith("k_proj"):
            expected = y.reshape(150, 2, 16).abs().amax(0)  # [Nkv, D]
            torch.testing.assert_close(tensors[f"{name}.output.absmax"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (
            ("auto_awq", "{m}", "--w-bits", "3", "--w-group-size", "32"),
            2,
            "--w-bits 3: awq checkpoints hold 4",
        ),
        (
            ("rtn", "{m}", "--w-group-size", "128"),
            2,
            "--w-group-size 128: does not divide self_attn.q_proj K=64",
        ),
        (
            ("auto_gptq", "{m}", "--w-group-size", "32", "--calib-dataset", "nowhere.txt"),
            2,
            "nowhere.txt: no such",
        ),
        (
            ("auto_gptq", "{m}", "--w-group-size", "32", "--calib-dataset", "{empty}"),
            1,
            "empty.txt: the file is empty",
        ),
        (("rtn", "{m}", "--w-group-size", "-5"), 2, "--w-group-size -5"),
        (("auto", "{m}", "--budget", "1.5"), 2, "--budget 1.5: expected bits per weight"),
        (("auto", "{m}", "--budget", "3.1"), 2, "--budget 3.1: below the smallest scheme, w3g64asym"),
        (
            ("auto", "{m}", "--budget", "5", "--format", "gptq"),
            2,
            "--format gptq: --budget mixes schemes",
        ),
        (("rtn", "/no/such/model"), 1, "/no/such/model"),
        (("calibrate", "{m}", "--calib-samples", "0"), 2, "--calib-samples 0"),
    ],
)
def test_errors_are_one_line_with_the_right_exit_code(
    monkeypatch, capsys, tiny, tmp_path, args, code, message
):
    empty = tmp_path / "empty.txt"
    empty.touch()
    args = [a.format(m=tiny, empty=empty) for a in args]
    assert turbomill(monkeypatch, "lite", *args, "--work-dir", tmp_path / "out") == code
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['turbomill', 'lite', '--help']\n"
        "from turbomill.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("calibrate", "rtn", "auto_awq", "auto_gptq"):
        assert command in done.stdout
