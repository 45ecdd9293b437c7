"""`turbomill check_env` with and without the native engine."""

import json
import sys

import pytest
from click.testing import CliRunner

import turbomill
from turbomill.reports import check_env as module
from turbomill.reports.check_env import check_env


def invoke(*arguments):
    return CliRunner().invoke(check_env, arguments)


def test_json():
    core = pytest.importorskip("turbomill._core")
    result = invoke("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["core"]["built"] and found["core"]["backends"] == core.build_info()["backends"]
    assert found["core"]["cpu"]["isa"] in ("baseline", "avx2", "avx512")
    assert found["packages"]["torch"] and isinstance(found["gpus"], list)
    assert {"turbomill", "python", "machine", "demo_model"} <= found.keys()


def test_table():
    pytest.importorskip("turbomill._core")
    result = invoke()
    assert result.exit_code == 0
    for word in ("native engine", "kernels used", "CPU features", "GPUs", "transformers", "demo model"):
        assert word in result.stdout


def test_missing_core(monkeypatch):
    monkeypatch.setitem(sys.modules, "turbomill._core", None)
    monkeypatch.delattr(turbomill, "_core", raising=False)
    result = invoke()
    assert result.exit_code == 1 and "NOT BUILT" in result.stdout and "make install" in result.stdout
    found = json.loads(invoke("--json").stdout)
    assert found["core"]["built"] is False and found["core"]["error"]


def test_gpus_of_the_driver(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert module._gpus() == [{"name": "NVIDIA H200", "memory_bytes": 143771 << 20, "seen_by": "nvidia-smi"}]


def test_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert module._gpus() == [] and ("GPUs", "none") in module._rows(module.inspect_environment())
