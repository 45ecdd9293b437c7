"""Interrupted evaluations go on where they stopped, to the same figures."""

import numpy as np
import pytest

from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.reports.evaluation import EvalOptions
from turbomill.reports.journal import Journal
from turbomill.reports.kv import KvOptions, evaluate_kv
from turbomill.reports.perplexity import evaluate_ppl
from turbomill.reports.scores import WindowResult

pytest.importorskip("turbomill._core")


@pytest.fixture
def options(text_file, tmp_path):
    return EvalOptions(str(text_file), windows=4, window_len=64, num_threads=2, cache=tmp_path / "cache")


@pytest.fixture
def passes(monkeypatch):
    """Counts passes of the engine; raises KeyboardInterrupt before the pass numbered `stop`."""
    logits = TurbomindEngine.logits

    class Passes:
        count, stop = 0, None

    async def counted(self, ids):
        if Passes.count == Passes.stop:
            raise KeyboardInterrupt
        Passes.count += 1
        return await logits(self, ids)

    monkeypatch.setattr(TurbomindEngine, "logits", counted)
    return Passes


def test_perplexity(tiny, tiny_rtn, options, passes, tmp_path):
    whole = evaluate_ppl(str(tiny_rtn), options, reference=str(tiny))
    assert passes.count == 8
    passes.count, passes.stop = 0, 3
    with pytest.raises(KeyboardInterrupt):
        evaluate_ppl(str(tiny_rtn), options, reference=str(tiny), work_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    passes.stop = None
    resumed = evaluate_ppl(str(tiny_rtn), options, reference=str(tiny), work_dir=tmp_path / "run")
    assert passes.count == 4 and resumed.score == whole.score
    # A whole one is measured anew, and leaves nothing.
    evaluate_ppl(str(tiny_rtn), options, reference=str(tiny))
    assert passes.count == 8 and not list(options.cache.glob("unfinished-*"))


def test_another_evaluation_does_not_take_its_windows(tiny, options, passes):
    passes.stop = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate_ppl(str(tiny), options)
    passes.stop = None
    evaluate_ppl(str(tiny), options, kv=KvScheme(4))
    assert passes.count == 2 + 4
    evaluate_ppl(str(tiny), options)
    assert passes.count == 6 + 2


def test_caches_that_are_done_are_not_scored_again(tiny, options, passes):
    wanted = KvOptions(("16", "8"), items=0, rounds=1, sensitivity=False)
    whole = evaluate_kv(str(tiny), options, wanted)
    passes.count, passes.stop = 0, 6
    with pytest.raises(KeyboardInterrupt):
        evaluate_kv(str(tiny), options, wanted)
    passes.stop = None
    resumed = evaluate_kv(str(tiny), options, wanted)
    assert passes.count == 8
    for a, b in zip(whole.policies, resumed.policies, strict=True):
        assert (a.ppl, a.kl, a.per_window, a.by_length) == (b.ppl, b.kl, b.per_window, b.by_length)


def test_a_damaged_file_is_scored_again(tmp_path, caplog):
    journal = Journal.of(tmp_path, store="s", windows="w")
    result = WindowResult(np.ones(3), None, None, None, first=1)
    journal.save("policy0", 2, result)
    found = journal.load("policy0", 2)
    assert found.nll.tolist() == [1, 1, 1] and found.kl is None and found.first == 1
    assert journal.load("policy8", 2) is None and journal.load("policy0", 1) is None
    journal._file("policy0", 2).write_bytes(b"PK broken")
    assert journal.load("policy0", 2) is None
    assert Journal.of(tmp_path, store="s", windows="x").path != journal.path
    journal.finish()
    assert not journal.path.exists()
