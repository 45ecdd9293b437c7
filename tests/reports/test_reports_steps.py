"""Steps are redone exactly when they must be."""

import pytest

from turbomill.reports.steps import Step


def make(text):
    return lambda output: output.write_text(text)


def test_unchanged_is_reused_and_changed_is_redone(tmp_path):
    output = tmp_path / "out"
    assert Step("a", output, {"x": 1}).run(make("one"))
    assert not Step("a", output, {"x": 1}).run(make("two"))
    assert output.read_text() == "one"
    assert Step("a", output, {"x": 2}).run(make("three"))
    assert output.read_text() == "three"


def test_an_interrupted_step_is_not_done(tmp_path):
    output = tmp_path / "out"
    Step("a", output, {"x": 1}).run(make("one"))

    def die(path):
        path.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Step("a", output, {"x": 2}).run(die)
    assert not Step("a", output, {"x": 1}).done and not Step("a", output, {"x": 2}).done


def test_without_output_or_with_a_damaged_stamp_it_is_not_done(tmp_path):
    step = Step("a", tmp_path / "out", {})
    step.run(make("one"))
    step.stamp.write_text("[]")
    assert not step.done
    step.run(make("two"))
    step.output.unlink()
    assert not step.done
