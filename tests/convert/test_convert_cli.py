"""The commands: output, exit codes, and a start without heavy imports."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from turbomill.cli import cli
from turbomill.errors import CheckpointError, UsageError


def run(*args):
    return CliRunner().invoke(cli, list(args), catch_exceptions=True)


def test_convert_and_inspect(tiny, tmp_path):
    path = tiny()
    result = run("convert", str(path), "--dst_path", str(tmp_path / "store"), "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["kind"] == "store" and made["architecture"] == "LlamaForCausalLM"
    shown = json.loads(run("inspect", str(tmp_path / "store"), "--json", "--verify").stdout)
    assert shown["verified"] is True and shown["tensors"] == made["tensors"]
    source = json.loads(run("inspect", str(path), "--json").stdout)
    assert source["parameters"] == made["parameters"] and source["chat_template"] is None
    assert source["bits_per_weight"] == pytest.approx(16)
    for target in (path, tmp_path / "store"):
        text = run("inspect", str(target)).stdout
        assert "LlamaForCausalLM" in text and "hidden_size: 128" in text and "norm.weight" in text
        assert "norm.weight" not in run("inspect", str(target), "--no-tensors").stdout


def test_errors_reach_the_caller(tiny, tmp_path):
    path = tiny()
    result = run("convert", str(tmp_path / "nowhere"), "--dst-path", str(tmp_path / "store"))
    assert isinstance(result.exception, CheckpointError)
    result = run("convert", str(path), "--dst-path", str(path))
    assert isinstance(result.exception, UsageError)
    run("convert", str(path), "--dst-path", str(tmp_path / "store"))
    shard = next((tmp_path / "store").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = run("inspect", str(tmp_path / "store"), "--verify")
    assert isinstance(result.exception, CheckpointError) and "checksum differs" in str(result.exception)


def test_one_line_and_the_exit_code(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "turbomill", "inspect", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "nowhere: no such file" in done.stderr


def test_help_imports_nothing_heavy():
    code = (
        "import sys, turbomill.convert.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
