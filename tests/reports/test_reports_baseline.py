"""`report --baseline`: figures beside those of another day; `runs`: what lies where."""

import json

import pytest
from click.testing import CliRunner
from reports_models import PROVENANCE, bench_run, card, demo_run, policy
from test_reports_compare import SHARED, noise, run

from turbomill.cli import cli
from turbomill.errors import UsageError
from turbomill.reports.baseline import Tolerance, against, figures
from turbomill.reports.list_runs import find_runs
from turbomill.reports.runs import Run, save_run


def changes(now, then, **tolerance):
    found = against([now], [then], Tolerance(**tolerance))
    return {(c.name, c.metric): c.change for c in found}


def test_the_same_runs_have_no_regression():
    for one in (demo_run(), bench_run()):
        assert set(changes(one, one).values()) == {"same"}


def test_better_and_worse_know_which_way_is_good():
    then = bench_run()
    slow = then.engine[0].model_copy(update={"decode_tok_s": 30.0, "prefill_tok_s": 600.0})
    found = changes(then.model_copy(update={"engine": [slow, then.engine[1]]}), then)
    label = "fp16 batch 1, 128 + 64"
    assert found[label, "decode tokens/s"] == "worse" and found[label, "prefill tokens/s"] == "better"
    assert found["fp16 batch 4, 128 + 64", "decode tokens/s"] == "same"
    within = slow.model_copy(update={"decode_tok_s": 39.0})
    found = changes(then.model_copy(update={"engine": [within]}), then)
    assert found[label, "decode tokens/s"] == "same"
    found = changes(then.model_copy(update={"engine": [within]}), then, speed=0.01)
    assert found[label, "decode tokens/s"] == "worse"


def test_kl_and_size_of_variants():
    then = demo_run()
    worse = then.variants[2].model_copy(update={"kl": 0.2, "disk_bytes": 90_000_000, "ppl": 13.61})
    found = changes(then.model_copy(update={"variants": [worse]}), then)
    assert found["awq", "KL"] == "worse" and found["awq", "size on disk, MB"] == "better"
    assert found["awq", "perplexity"] == "same"
    # Of KL near nothing a tenth of a nat is the measure: 0.0001 to 0.0005 is no regression.
    small = [
        v.model_copy(update={"kl": kl}) for v, kl in zip(then.variants[:2], (0.0001, 0.0005), strict=True)
    ]
    small[1] = small[1].model_copy(update={"name": "fp16"})
    pair = [then.model_copy(update={"variants": [v]}) for v in small]
    assert changes(pair[1], pair[0])["fp16", "KL"] == "same"


def test_what_the_windows_do_not_agree_on_is_no_regression():
    """2 % more perplexity on average, by one window alone, and by all of them."""
    one = SHARED.copy()
    one[3] += 0.02 * 24
    assert changes(run("m", one), run("m", SHARED))["m", "perplexity"] == "same"
    assert changes(run("m", SHARED + 0.02 + noise(1)), run("m", SHARED))["m", "perplexity"] == "worse"
    # Other text: the means are all there is.
    assert changes(run("m", one, sha="other"), run("m", SHARED))["m", "perplexity"] == "worse"


def test_kv_policies_and_servers():
    rows = [policy(16), policy(4).model_copy(update={"passkey": 0.9})]
    then = Run(kind="kv", model=card("m"), policies=rows, provenance=PROVENANCE)
    now = then.model_copy(update={"policies": [rows[0], rows[1].model_copy(update={"passkey": 0.5})]})
    assert changes(now, then)["m KV 4", "passkey"] == "worse"
    load = {"model_id": "s", "request_rate": 4.0, "p99_ttft_ms": 100.0, "output_throughput": 50.0}
    then = Run(kind="bench_serve", serve=[load], provenance=PROVENANCE)
    now = then.model_copy(update={"serve": [{**load, "p99_ttft_ms": 200.0, "output_throughput": 80.0}]})
    found = changes(now, then)
    assert found["server s at 4.0 requests/s", "p99 TTFT, ms"] == "worse"
    assert found["server s at 4.0 requests/s", "output tokens/s"] == "better"


def test_nothing_in_common_is_refused():
    with pytest.raises(UsageError, match="no figure in common"):
        against([run("a", SHARED)], [run("b", SHARED)])
    for wrong in ({"quality": -0.1}, {"speed": 1.0}, {"speed": float("nan")}):
        with pytest.raises(UsageError, match="tolerance"):
            Tolerance(**wrong)
    assert len(figures([run("a", SHARED)])) == 2


def test_command(tmp_path):
    save_run(run("m", SHARED), tmp_path / "then")
    save_run(run("m", SHARED + 0.1), tmp_path / "now")
    arguments = ["report", str(tmp_path / "now"), "--baseline", str(tmp_path / "then")]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert [c["change"] for c in found["changes"]] == ["worse", "same"]
    page = (tmp_path / "now" / "report.html").read_text()
    assert '<tr class="bad"><th scope="row">m</th><td>perplexity</td>' in page
    assert 'class="failed">REGRESSION: against the baseline 1 of 2 figures' in page
    assert page.index("REGRESSION") < page.index("perplexity 2")
    markdown = (tmp_path / "now" / "report.md").read_text()
    assert "| m | perplexity |" in markdown and "| worse |" in markdown
    assert "worse: perplexity of m:" in CliRunner().invoke(cli, arguments).stdout
    turned = ["report", str(tmp_path / "then"), "--baseline", str(tmp_path / "now")]
    assert CliRunner().invoke(cli, turned).exit_code == 0
    assert "none of 2 figures is worse" in (tmp_path / "then" / "report.html").read_text()


def test_runs_are_listed_oldest_first_and_broken_ones_too(tmp_path):
    def at(time, **fields):
        return demo_run().model_copy(update={"provenance": {**PROVENANCE, "time": time}, **fields})

    save_run(at("2026-11-30T12:00:00Z"), tmp_path / "b" / "deep")
    save_run(at("2026-11-30T10:00:00Z", status="failed", error="window 1"), tmp_path / "a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text("{")
    found = find_runs([tmp_path, tmp_path / "b"])
    assert [(row.path, row.status) for row in found] == [
        (str(tmp_path / "a"), "failed"),
        (str(tmp_path / "b" / "deep"), "complete"),
        (str(tmp_path / "c"), "unreadable"),
    ]
    assert (
        "window 1" in found[0].says and "gptq stays closest" in found[1].says and "not JSON" in found[2].says
    )
    listed = json.loads(CliRunner().invoke(cli, ["runs", str(tmp_path), "--json"]).stdout)
    assert [row["kind"] for row in listed] == ["demo", "demo", ""] and listed[1]["model"] == "fp16"
    assert "failed" in CliRunner().invoke(cli, ["runs", str(tmp_path)]).stdout
