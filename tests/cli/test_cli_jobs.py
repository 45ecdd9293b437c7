"""Commands of reports/: JSON on stdout and nothing else, runs that become a report."""

import json

import pytest

pytest.importorskip("turbomill._core")


def result(run):
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(f"{i} times {i} makes {i * i}." for i in range(100)))
    return file


def test_from_checkpoint_to_report(turbomill, tiny, text):
    sizes = ["--dataset", text, "--windows", 2, "--window-len", 64, "--num-threads", 2, "--json"]
    group = ["--w-group-size", 64]
    assert turbomill("lite", "rtn", tiny, "--work-dir", "rtn", *group).returncode == 0
    ppl = result(turbomill("eval", "ppl", "rtn", *sizes, "--work-dir", "runs/ppl"))
    assert ppl["ppl"] > 1 and ppl["kl"] > 0 and 0 < ppl["top1"] <= 1 and ppl["positions"] == 128
    assert ppl["reference"]["name"] == str(tiny), "the source was recorded by lite"
    judged = turbomill("eval", "kv", tiny, *sizes, "--test-round", 1, "--work_dir", "runs/kv")
    kv = json.loads(judged.stdout)
    assert [p["name"] for p in kv["policies"]] == ["16", "fp8", "8", "k8v4r", "4", "4r"]
    assert {"bits_per_token", "ppl", "kl", "by_length", "verdict"} <= kv["policies"][0].keys()
    assert judged.returncode == {"safe": 0, "test first": 3, "do not use": 4}[kv["verdict"]]
    grid = ["--concurrency", "1,2", "--prompt_tokens", "8", "--completion-tokens", "64", "--test-round", 1]
    bench = result(turbomill("bench", "engine", tiny, *grid, "--work-dir", "runs/bench", "--json"))
    assert [(s["batch"], s["prompt_tokens"]) for s in bench["engine"]] == [(1, 8), (2, 8)]
    made = result(turbomill("report", "runs/ppl", "runs/kv", "runs/bench", "--output", "page.html", "--json"))
    assert made == {"html": "page.html", "markdown": "page.md", "json": "page.json"}
    page = (turbomill.folder / "page.html").read_text()
    assert "perplexity" in page and "KV cache" in page and "Engine" in page
    assert "KL" in (turbomill.folder / "page.md").read_text()
    assert {run["kind"] for run in result(turbomill("runs", "runs", "--json"))} == {
        "ppl",
        "kv",
        "bench_engine",
    }
    worse = turbomill("report", "runs/kv", "--baseline", "runs/kv", "--output", "same.html")
    assert worse.returncode == 0, "a run is no worse than itself"


def test_tables_are_for_people(turbomill, tiny_store, text):
    run = turbomill("eval", "ppl", tiny_store, "--dataset", text, "--windows", 1, "--window-len", 64)
    assert run.returncode == 0 and "perplexity" in run.stdout and "no reference" in run.stderr
    run = turbomill(
        "bench", "engine", tiny_store, "--concurrency", 1, "--completion-tokens", 8, "--test-round", 1
    )
    assert run.returncode == 0 and "prefill tok/s" in run.stdout


def test_check_env_as_a_process(process):
    found = result(process("check-env", "--json"))
    assert found["core"]["built"] and "machine" in found
