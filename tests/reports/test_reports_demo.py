"""The demo's whole job on a tiny model, and what a second run reuses."""

import importlib.util
import json
import subprocess
import sys

import pytest
from reports_models import make_model

from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import demo as module
from turbomill.reports.demo import DemoOptions, demo_json, run_demo
from turbomill.reports.runs import load_run

pytest.importorskip("turbomill._core")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Room for the question through the chat template.
    return make_model(tmp_path_factory.mktemp("demo") / "model", max_position_embeddings=512)


@pytest.fixture(scope="module")
def options(model):
    return DemoOptions(
        model=str(model),
        calib_samples=4,
        calib_seqlen=64,
        windows=2,
        window_len=64,
        rounds=1,
        num_threads=2,
        max_tokens=4,
        session_len=256,
    )


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("work") / "demo"
    return work_dir, run_demo(work_dir, options)


def made(work_dir):
    """Every step's output with the time it was made."""
    stamps = sorted(work_dir.rglob("*.step.json"))
    return {str(p.relative_to(work_dir)).removesuffix(".step.json"): p.stat().st_mtime_ns for p in stamps}


def test_table(finished):
    work_dir, run = finished
    result = demo_json(run)
    json.dumps(result)
    assert [v["name"] for v in result["variants"]] == ["fp16", "rtn", "awq", "gptq"]
    fp16, *others = result["variants"]
    assert abs(fp16["kl"]) < 1e-6 and fp16["top1"] == 1 and fp16["peak_bytes"] > fp16["disk_bytes"]
    for variant in others:
        assert variant["kl"] > 1e-4 and variant["disk_bytes"] < fp16["disk_bytes"]
        assert variant["model"]["scheme"].endswith("w4g64asym")
    for variant in result["variants"]:
        assert list(variant["kv"]) == ["16", "8", "4r"]
        assert variant["kv"]["16"]["ppl"] == variant["ppl"] and variant["kv"]["16"]["kl"] == variant["kl"]
        assert variant["kv"]["4r"]["bytes_per_token"] < variant["kv"]["8"]["bytes_per_token"]
        assert variant["decode_tok_s"] > 0
    assert isinstance(result["answer"], str) and result["question"] == module.QUESTION
    assert load_run(work_dir) == run
    page = (work_dir / "report.html").read_text()
    assert "What is the capital of France?" in page and (work_dir / "report.md").exists()


def test_second_run_reuses_everything(finished, options):
    work_dir, run = finished
    before = made(work_dir)
    assert len(before) == 3 + 4 + 4
    again = run_demo(work_dir, options)
    assert made(work_dir) == before and again.variants == run.variants


def test_a_changed_option_redoes_what_depends_on_it(finished, options):
    work_dir, _ = finished
    before = made(work_dir)
    run_demo(work_dir, DemoOptions(**{**vars(options), "calib_samples": 3}))
    after = made(work_dir)
    redone = {name for name in before if before[name] != after[name]}
    assert {"checkpoints/gptq", "stores/gptq", "scores/gptq.json", "checkpoints/awq"} <= redone
    # RTN needs no calibration. (AWQ may come out the same, and then its store is still right.)
    assert not redone & {
        "checkpoints/rtn",
        "stores/rtn",
        "scores/rtn.json",
        "stores/fp16",
        "scores/fp16.json",
    }


def test_peak_memory_is_the_childs_own():
    """What the parent once held does not count."""
    held = b"x" * (1200 << 20)
    code = "from turbomill.reports.score_variant import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 10 << 20 < int(child.stdout) < len(held)


def test_openai_is_asked_for_before_any_work(monkeypatch, tmp_path, options):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else find(name))
    with pytest.raises(UsageError, match=r"turbomill\[demo\]"):
        run_demo(tmp_path / "demo", options)
    assert not (tmp_path / "demo").exists()


def test_a_failing_score_stops_the_demo(finished, options, monkeypatch, tmp_path, capfd):
    """The context is 512 tokens: the child refuses longer windows in its own words."""
    work_dir, _ = finished
    with pytest.raises(TurbomillError, match="scoring fp16 failed with exit code 2"):
        run_demo(work_dir, DemoOptions(**{**vars(options), "window_len": 513}))
    assert "error: --window-len 513: the model's context is 512" in capfd.readouterr().err


@pytest.mark.demo_model
def test_demo_answer(tmp_path):
    """The built-in model, as it is, knows the capital of France."""
    from turbomill.engine.stores import open_model

    answer = module.ask(str(open_model("demo").path), DemoOptions(num_threads=2, max_tokens=16))
    assert "Paris" in answer
