"""`eval compare`: pairs, corrections, and what cannot be compared."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from reports_models import PROVENANCE, card

from turbomill.cli import cli
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.compare import compare, compared_json, holm, scored_models
from turbomill.reports.evaluation import EvalOptions
from turbomill.reports.kv import KvOptions, evaluate_kv
from turbomill.reports.perplexity import evaluate_ppl
from turbomill.reports.runs import Run, Score, WindowScores, save_run

SHARED = np.random.default_rng(0).normal(3, 0.5, 24)


def run(name, nll, kl=None, sha="text", reference="f" * 64, **changes):
    """A run of windows with 99 predicted tokens each."""
    windows = WindowScores(
        tokens=[99] * len(nll), nll=list(nll), kl=None if kl is None else list(kl), top1=None
    )
    score = Score(
        ppl=float(np.exp(np.mean(nll))),
        kl=None if kl is None else float(np.mean(kl)),
        top1=None,
        positions=100 * len(nll),
        per_window=windows,
    )
    fields = {
        "kind": "ppl",
        "model": card(name),
        "reference": card("ref").model_copy(update={"fingerprint": reference}),
        "windows": {"sha256": sha, "stride": None},
        "score": score,
        "provenance": PROVENANCE,
    }
    return Run(**{**fields, **changes})


def saved(tmp_path, *runs):
    for number, one in enumerate(runs):
        save_run(one, tmp_path / str(number))
    return [tmp_path / str(number) for number in range(len(runs))]


def noise(seed, size=0.01):
    return np.random.default_rng(seed).normal(0, size, 24)


def test_a_small_but_steady_difference_is_seen_and_noise_is_not(tmp_path):
    models = scored_models(
        saved(
            tmp_path,
            run("fp16", SHARED),
            run("worse", SHARED + 0.02 + noise(1)),
            run("same", SHARED + noise(4) - noise(4).mean() + 0.0005),
            run("better", SHARED - 0.02 + noise(3)),
        )
    )
    rows = {row.name: row for row in compare(models)}
    assert {name: row.verdict for name, row in rows.items()} == {
        "worse": "worse",
        "same": "no difference shown",
        "better": "better",
    }
    assert rows["worse"].difference.low > 0 > rows["better"].difference.high
    assert rows["same"].difference.low < 0 < rows["same"].difference.high
    found = compared_json(models, list(rows.values()))
    entry = found["comparisons"][0]
    assert entry["ppl_ratio"] == pytest.approx(models[1].ppl / models[0].ppl) and entry["p_value"] < 0.05
    assert entry["difference"] == pytest.approx(0.02, abs=0.01) and json.dumps(found)


def test_kl_is_compared_where_the_reference_is_the_same(tmp_path):
    kl = np.full(24, 0.1) + noise(5, 0.001)
    paths = saved(
        tmp_path,
        run("a", SHARED, kl),
        run("b", SHARED, kl * 0.5),
        run("c", SHARED, kl, reference="0" * 64),
        run("d", SHARED),
    )
    rows = [(row.name, row.metric, row.verdict) for row in compare(scored_models(paths))]
    assert [row for row in rows if row[1] == "kl"] == [("b", "kl", "better")]
    assert [row[0] for row in rows if row[1] == "nll"] == ["b", "c", "d"]


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_many_looks_cost_certainty(tmp_path):
    """A difference that alone would pass does not among ten."""
    others = [run(f"n{i}", SHARED + noise(i + 10)) for i in range(10)]
    alone = [compare(scored_models(saved(tmp_path, run("a", SHARED), o)))[0].p_value for o in others]
    together = [row.p_value for row in compare(scored_models(saved(tmp_path, run("a", SHARED), *others)))]
    assert together == pytest.approx(holm(alone)) and min(together) > min(alone)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (run("b", SHARED, sha="other"), r"1: was scored on other windows of text than .*0"),
        (run("b", SHARED, windows={"sha256": "text", "stride": 8}), "other windows"),
        (run("b", SHARED, score=None), "1: scored nothing"),
        (run("b", SHARED, windows=None), "1: has no scores by window"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, second, message):
    with pytest.raises(UsageError, match=message):
        scored_models(saved(tmp_path, run("a", SHARED), second))


def test_one_model_or_one_window_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a single scored model"):
        scored_models(saved(tmp_path, run("a", SHARED)))
    with pytest.raises(UsageError, match="at least two --windows"):
        scored_models(saved(tmp_path, run("a", [3.0]), run("b", [3.1])))
    with pytest.raises(TurbomillError, match="no such file"):
        scored_models([tmp_path / "missing"])


def test_real_runs_through_the_command(tiny, tiny_rtn, text_file, tmp_path):
    pytest.importorskip("turbomill._core")
    options = EvalOptions(str(text_file), windows=6, window_len=64, num_threads=2, cache=tmp_path / "cache")
    evaluate_ppl(str(tiny), options, reference=str(tiny), work_dir=tmp_path / "fp16")
    evaluate_ppl(str(tiny_rtn), options, reference=str(tiny), work_dir=tmp_path / "rtn")
    evaluate_kv(str(tiny), options, KvOptions(("16", "4"), items=0, rounds=1), work_dir=tmp_path / "kv")
    arguments = ["eval", "compare", *(str(tmp_path / name) for name in ("fp16", "rtn", "kv"))]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    names = [str(tiny_rtn), f"{tiny} KV 16", f"{tiny} KV 4"]
    assert [m["name"] for m in found["models"]] == [str(tiny), *names] and found["windows"] == 6
    verdicts = {(c["name"], c["metric"]): c["verdict"] for c in found["comparisons"]}
    assert verdicts[names[1], "nll"] == "no difference shown" and verdicts[names[0], "kl"] == "worse"
    assert "KV 4" in CliRunner().invoke(cli, arguments).stdout
