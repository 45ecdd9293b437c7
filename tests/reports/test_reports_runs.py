"""run.json: written whole, read back, refused when it is not what it should be."""

import json

import pytest
from reports_models import bench_run, demo_run

from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.runs import check_run_dir, load_run, new_run, save_run, write_atomic


def test_round_trip(tmp_path):
    for name, run in (("a", demo_run()), ("b", bench_run())):
        file = save_run(run, tmp_path / name)
        assert load_run(tmp_path / name) == load_run(file) == run
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["run.json", "run.json"]


def test_provenance_says_what_made_it():
    made = new_run("ppl", {"windows": 3}).provenance
    assert {"command", "time", "versions", "machine", "settings"} <= made.keys()
    assert made["settings"] == {"windows": 3}


def test_others_can_read_it(tmp_path):
    save_run(demo_run(), tmp_path)
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["schema_version"] == 2
    assert [v["name"] for v in data["variants"]] == ["fp16", "rtn", "awq", "gptq"]
    assert data["variants"][2]["kv"]["8"]["quant_policy"] == 8


def test_older_files_are_read(tmp_path):
    """Version 1 lacks fields that have defaults."""
    data = {**demo_run().model_dump(), "schema_version": 1}
    data["score"] = {"ppl": 8.0, "kl": None, "top1": None, "positions": 9, "per_window": None}
    (tmp_path / "run.json").write_text(json.dumps(data))
    run = load_run(tmp_path)
    assert run.score.ppl == 8 and run.score.top5 is None and run.score.ppl_ci is None


def broken(**changes):
    return {**demo_run().model_dump(), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(broken(schema_version=3)), "schema_version is 3, this turbomill reads 1 and 2"),
        (json.dumps({}), "schema_version is None"),
        (json.dumps([]), "schema_version is None"),
        (json.dumps(broken(variants=[{"name": "x"}])), r"variants\.0\.model: Field required"),
        (json.dumps(broken(surprise=1)), "surprise"),
        (json.dumps(broken(kind="party")), "kind"),
        ("{", "not JSON"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, content, message):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(TurbomillError, match=message) as caught:
        load_run(tmp_path)
    assert str(tmp_path / "run.json") in str(caught.value) and "\n" not in str(caught.value)


def test_missing_run(tmp_path):
    with pytest.raises(TurbomillError, match=r"run\.json: no such file"):
        load_run(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_atomic(file, "old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(UsageError, match="No space left"):
        write_atomic(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_work_dir_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--work-dir .*is a file"):
        check_run_dir(tmp_path / "file")
    check_run_dir(tmp_path / "new" / "deeper")
