"""`sweep`: the file checked key by key, the grid, what is redone, what a failure leaves."""

import io
import json
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from turbomill import console
from turbomill.cli import cli
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import sweep as module
from turbomill.reports.runs import load_run
from turbomill.reports.sweep import Sweeper
from turbomill.reports.sweep_file import load_sweep
from turbomill.reports.sweep_table import SweepTable

pytest.importorskip("turbomill._core")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "recipes.yaml"
        path.write_text(text)
        return path

    return write


def test_lists_make_a_grid(write):
    sweep = load_sweep(
        write(
            "model: demo\nrecipes:\n"
            "  - {method: rtn, w_group_size: [64, 128]}\n"
            "  - {method: [awq, gptq], w_group_size: 64, calib_samples: [8, 16]}\n"
            "  - {name: small, method: auto, budget: 4.25}\n"
            "score: {windows: all, window_len: 2048}\n"
            "bench: {concurrency: [1, 4], prompt_tokens: [8], completion_tokens: [4, 8]}\n"
            "serve: {num_prompts: 4, goodput: ['ttft:200']}\n"
        )
    )
    assert [recipe.name for recipe in sweep.recipes] == [
        *("rtn-w4g64", "rtn-w4g128"),
        *(f"{m}-w4g64-calib_samples-{n}" for m in ("awq", "gptq") for n in (8, 16)),
        "small",
    ]
    assert sweep.recipes[2].options.calib_samples == 8 and sweep.recipes[2].method == "awq"
    assert sweep.recipes[-1].options.budget == 4.25 and sweep.recipes[-1].options.group == 128
    assert sweep.score.windows is None and sweep.score.window_len == 2048
    assert [(load.batch, load.completion_tokens) for load in sweep.loads] == [(1, 4), (4, 4), (1, 8), (4, 8)]
    assert sweep.tasks is None and sweep.kv is None and sweep.serve.num_prompts == 4 and sweep.slo.ttft == 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("recipes: [{method: rtn}]", "model: Field required"),
        ("model: a", "recipes: Field required"),
        ("model: a\nrecipes: []", "recipes: List should have at least 1 item"),
        ("model: a\nrecipes: [{method: rnt}]", r"recipes\.0\.method: Input should be 'rtn', 'awq'"),
        ("model: a\nrecipes: [{method: rtn}, {method: rtn, w_bit: 4}]", r"recipes\.1\.w_bit: unknown key"),
        ("model: a\nrecipes: [{method: rtn, w_bits: four}]", r"recipes\.0\.w_bits: Input should be a valid"),
        ("model: a\nrecipes: [{method: rtn, w_bits: []}]", r"recipes\.0\.w_bits: an empty list"),
        ("model: a\nrecipes: [{method: rtn, w_bits: 9}]", r"recipes\.0: --w-bits 9: expected 2 to 8"),
        ("model: a\nrecipes: [{method: rtn}, {method: rtn}]", r"recipes\.1\.name: rtn-w4g128 is there twice"),
        ("model: a\nrecipes: [{method: rtn, name: a/b}]", r"recipes\.0\.name: String should match"),
        ("model: a\nrecipes: [{method: rtn}]\nscore: {windows: 0}", "score: --windows 0"),
        ("model: a\nrecipes: [{method: rtn}]\nscore: {windows: few}", r"score\.windows: Input should be"),
        ("model: a\nrecipes: [{method: rtn}]\nbench: {concurrency: [0]}", "bench: --concurrency 0"),
        ("model: a\nrecipes: [{method: rtn}]\ntasks: {limit: -1}", "tasks: --limit -1"),
        ("model: a\nrecipes: [{method: rtn}]\nkv: {items: -1}", "kv: --items -1"),
        ("model: a\nrecipes: [{method: rtn}]\nserve: {goodput: [fast]}", "serve: --goodput fast"),
        ("model: a\nmodel: b\nrecipes: [{method: rtn}]", "line 2, column 1: model is there twice"),
        ("model: [a\n", r"line 2, column 1: "),
        ("- a", "expected a mapping"),
        ("", "expected a mapping"),
    ],
)
def test_what_is_wrong_with_the_file_is_one_line_with_its_key(write, text, told):
    path = write(text)
    with pytest.raises(UsageError, match=told) as caught:
        load_sweep(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.yaml: cannot be read"):
        load_sweep(tmp_path / "nowhere.yaml")


def text_of(tiny, text_file, recipes, more=""):
    return (
        f"model: {tiny}\nnum_threads: 2\nrecipes:\n{recipes}"
        f"score: {{dataset: {text_file}, windows: 2, window_len: 64}}\n"
        f"bench: {{prompt_tokens: [8], completion_tokens: [4], test_round: 1}}\n{more}"
    )


RECIPES = "  - {name: rtn, method: rtn, w_group_size: 64}\n"
AWQ = "  - {name: awq, method: awq, w_group_size: 64, calib_samples: 2, calib_seqlen: 64}\n"


def states(sweeper):
    return {key: state for key, state in sweeper.table.states.items() if state != "unchanged"}


@pytest.fixture(scope="module")
def swept(tiny, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    path = folder / "recipes.yaml"
    path.write_text(text_of(tiny, text_file, RECIPES + AWQ))
    arguments = ["sweep", str(path), "--work-dir", str(folder / "out")]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return folder / "out", path, json.loads(result.stdout)


def test_a_sweep_leaves_a_report_of_everything(swept):
    out, _, printed = swept
    run = load_run(out)
    assert run.kind == "sweep" and [v.name for v in run.variants] == ["dense", "rtn", "awq"]
    dense, *others = run.variants
    assert abs(dense.kl) < 1e-6 and all(v.kl > 1e-4 and v.disk_bytes < dense.disk_bytes for v in others)
    assert all(v.decode_tok_s > 0 for v in run.variants) and printed["failed"] == {}
    assert [v["ppl"] for v in printed["variants"]] == [v.ppl for v in run.variants]
    page = (out / "report.html").read_text()
    assert 'id="size-quality"' in page and 'id="quality-speed"' in page and "Engine, awq" in page
    assert "Linears, awq" in page and (out / "report.md").exists()


def test_what_is_unchanged_is_not_redone(swept):
    out, path, _ = swept
    sweeper = Sweeper(load_sweep(path), out)
    again = sweeper.run()
    assert states(sweeper) == {} and again.variants == load_run(out).variants
    # Another scheme of one recipe: the rest stays.
    path.write_text(
        path.read_text().replace("name: rtn, method: rtn,", "name: rtn, method: rtn, symmetric: true,")
    )
    sweeper = Sweeper(load_sweep(path), out)
    sweeper.run()
    assert states(sweeper) == {("rtn", step): "made" for step in ("quantize", "convert", "score", "bench")}


def test_a_measurement_more_redoes_no_other(swept):
    out, path, _ = swept
    path.write_text(path.read_text() + "tasks: {tasks: [turbomill_arithmetic_add], limit: 2}\n")
    sweeper = Sweeper(load_sweep(path), out)
    sweeper.run()
    assert states(sweeper) == {(name, "tasks"): "made" for name in ("dense", "rtn", "awq")}
    assert "turbomill_arithmetic_add" in (out / "report.md").read_text()


def test_a_variant_that_fails_leaves_the_others(tiny, text_file, write, tmp_path, monkeypatch):
    path = write(text_of(tiny, text_file, RECIPES + AWQ))
    quantize = module.quantize

    def failing(model, output, method, options):
        if method == "rtn":
            raise TurbomillError("the disk is full")
        return quantize(model, output, method, options)

    monkeypatch.setattr(module, "quantize", failing)
    result = CliRunner().invoke(cli, ["sweep", str(path), "--work-dir", str(tmp_path / "out")])
    assert result.exit_code == 1 and "failed: rtn: the disk is full" in result.output
    run = load_run(tmp_path / "out")
    assert [v.name for v in run.variants] == ["dense", "awq"]
    assert run.status == "failed" and run.error == "rtn: the disk is full"
    # Repaired, it goes on with what is missing.
    monkeypatch.undo()
    sweeper = Sweeper(load_sweep(path), tmp_path / "out")
    assert sweeper.run().status == "complete" and {name for name, _ in states(sweeper)} == {"rtn"}


def test_every_recipe_is_checked_before_the_first_begins(tiny, text_file, write, tmp_path):
    wrong = "  - {name: a, method: awq, w_bits: 3}\n  - {name: b, method: rtn, w_group_size: 48}\n"
    sweeper = Sweeper(load_sweep(write(text_of(tiny, text_file, RECIPES + wrong))), tmp_path / "out")
    with pytest.raises(UsageError, match=r"2 of 3 recipes cannot run: a: .*; b: ") as caught:
        sweeper.run()
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_an_interrupted_sweep_goes_on(tiny, text_file, write, tmp_path, monkeypatch):
    sweep = load_sweep(write(text_of(tiny, text_file, RECIPES)))
    made = module.bench_engine
    monkeypatch.setattr(module, "bench_engine", interrupt)
    sweeper = Sweeper(sweep, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        sweeper.run()
    assert sweeper.table.states["dense", "bench"] == "failed"
    monkeypatch.setattr(module, "bench_engine", made)
    sweeper = Sweeper(sweep, tmp_path / "out")
    sweeper.run()
    assert sweeper.table.states["dense", "score"] == "unchanged"
    assert sweeper.table.states["dense", "bench"] == "made" and sweeper.table.states["rtn", "score"] == "made"


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_the_table_is_alive_on_a_terminal(monkeypatch):
    """With a bar of progress inside it, as every long step has one."""
    screen = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=screen, force_terminal=True, width=120))
    table = SweepTable(["dense", "awq"], ["quantize", "score"])
    with table.shown():
        with table.step("awq", "quantize"), console.progress("AWQ", 2) as task:
            task.advance(2)
        table.set("dense", "score", "unchanged")
        table.tell("awq", ("13.600", "0.1389", "120.0", "71.0"))
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    last = seen[seen.rindex("Sweep") :]
    assert "running" in seen and "AWQ" in seen
    assert re.search(r"awq\s+│ made\s+│.*13\.600.*0\.1389", last) and "unchanged" in last


def test_without_a_terminal_there_are_lines(caplog):
    import logging

    table = SweepTable(["awq"], ["score"])
    with caplog.at_level(logging.INFO, "turbomill.reports"), table.shown(), table.step("awq", "score"):
        pass
    assert "awq: score done in 0 s" in caplog.text
