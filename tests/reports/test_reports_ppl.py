"""`evaluate_ppl` on the native engine, against transformers on the same windows."""

import json

import numpy as np
import pytest
import torch
from reports_models import make_model

from turbomill.calib_data import Windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import evaluation
from turbomill.reports.evaluation import EvalOptions, References, load_eval_windows, score
from turbomill.reports.perplexity import evaluate_ppl
from turbomill.reports.runs import load_run

pytest.importorskip("turbomill._core")


@pytest.fixture
def options(text_file, tmp_path):
    return EvalOptions(str(text_file), windows=3, window_len=100, num_threads=2, cache=tmp_path / "reference")


@torch.inference_mode()
def dense_scores(candidate, reference, ids):
    """Perplexity, KL and top-1 by transformers in fp64 on windows [n, T]."""
    q_model, p_model = (load_dense_model(open_checkpoint(path)) for path in (candidate, reference))
    nll, kl, top1 = [], [], []
    for window in ids:
        q = q_model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        p = p_model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        nll.append(-q[:-1].gather(1, window[1:, None]).mean())
        kl.append((p.exp() * (p - q)).sum(-1).mean())
        top1.append((p.argmax(-1) == q.argmax(-1)).double().mean())
    return [float(torch.stack(values).mean()) for values in (nll, kl, top1)]


def test_equals_transformers(tiny, tiny_rtn, options, tmp_path):
    run = evaluate_ppl(str(tiny_rtn), options, reference=str(tiny), work_dir=tmp_path / "run")
    ids = load_eval_windows(open_model(tiny), options).ids
    assert ids.shape == (3, 100)
    nll, kl, top1 = dense_scores(tiny_rtn, tiny, ids)
    assert run.score.ppl == pytest.approx(np.exp(nll), rel=2e-4)
    assert run.score.kl == pytest.approx(kl, rel=2e-2) and run.score.kl > 0.001
    assert run.score.top1 == pytest.approx(top1, abs=0.02)
    assert load_run(tmp_path / "run") == run
    assert run.provenance["settings"]["window_len"] == 100 and run.windows["sha256"]


def test_dense_model_equals_transformers_to_four_digits(tiny, options):
    run = evaluate_ppl(str(tiny), options)
    nll, _, _ = dense_scores(tiny, tiny, load_eval_windows(open_model(tiny), options).ids)
    assert run.score.ppl == pytest.approx(np.exp(nll), rel=1e-4)
    assert run.score.kl is None and run.reference is None


def test_no_divergence_from_itself(tiny, options):
    run = evaluate_ppl(str(tiny), options, reference=str(tiny))
    assert abs(run.score.kl) < 1e-6 and run.score.top1 == 1


def test_the_reference_is_the_recorded_source(tiny, tiny_rtn, options, caplog):
    run = evaluate_ppl(str(tiny_rtn), options)
    assert run.reference.name == str(tiny) and run.score.kl > 0.001
    store = open_model(tiny_rtn)
    assert evaluation.find_reference(str(store.path), store) == str(tiny)


def test_a_changed_source_is_not_the_reference(tiny_rtn, options, tmp_path):
    marker = json.loads((tiny_rtn / "turbomill.json").read_text())
    other = make_model(tmp_path / "other", seed=9)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_rtn.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "turbomill.json").write_text(json.dumps({**marker, "source": str(other)}))
    assert evaluation.find_reference(str(copy), open_model(copy)) is None


def test_kv_quantization_shows(tiny, options):
    kl = [evaluate_ppl(str(tiny), options, reference=str(tiny), quant_policy=p).score.kl for p in (8, 4)]
    assert 0 < kl[0] < kl[1]


def test_reference_logits_are_computed_once_and_resume(tiny_store, options, monkeypatch):
    cut = load_eval_windows(tiny_store, options)
    asked = []
    logits = TurbomindEngine.logits

    async def counted(self, ids):
        asked.append(list(ids))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return await logits(self, ids)

    monkeypatch.setattr(TurbomindEngine, "logits", counted)
    references = References(tiny_store, cut, options)
    with pytest.raises(KeyboardInterrupt):
        references.prepare()
    references.prepare()
    references.prepare()
    # The first window survived the interruption; nothing is computed twice.
    assert asked == [cut.ids[i].tolist() for i in (0, 1, 1, 2)]


def test_other_windows_are_another_cache(tiny_store, options, text_file, tmp_path):
    cut = load_eval_windows(tiny_store, options)
    other = EvalOptions(str(text_file), windows=2, window_len=50, cache=options.cache)
    keys = {
        References(tiny_store, windows, opts)._cache.path
        for windows, opts in ((cut, options), (load_eval_windows(tiny_store, other), other))
    }
    assert len(keys) == 2


def test_vocabulary_mismatch_is_refused(tiny, options, tmp_path):
    other = make_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(UsageError, match=r"--reference .*vocabulary.*\(300 and 256 tokens\)"):
        evaluate_ppl(str(tiny), options, reference=str(other))


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("word " * 10, 100, "50 tokens of text are too short for one window of 100"),
        ("", 100, "empty"),
        ("word " * 100, 257, "the model's context is 256"),
    ],
)
def test_short_texts_are_refused(tiny, tmp_path, text, length, message):
    file = tmp_path / "short.txt"
    file.write_text(text)
    with pytest.raises(TurbomillError, match=message):
        evaluate_ppl(str(tiny), EvalOptions(str(file), windows=2, window_len=length))


def test_a_models_own_text_is_refused(tiny):
    with pytest.raises(UsageError, match="--dataset self"):
        evaluate_ppl(str(tiny), EvalOptions("self", window_len=100))


class BrokenEngine:
    def __init__(self, vocab):
        self.vocab, self.calls = vocab, 0

    async def logits(self, token_ids):
        out = np.zeros((len(token_ids), self.vocab), np.float32)
        out[7] = np.nan if self.calls == 1 else 0
        self.calls += 1
        return out


def test_nan_logits_name_their_window():
    cut = Windows(torch.zeros(3, 20, dtype=torch.int64), "text", "evaluation", "x")
    with pytest.raises(TurbomillError, match="broken: window 1, position 7: the logits hold NaN"):
        score(BrokenEngine(8), cut, None, "broken")


def test_a_failed_run_says_so(tiny, options, tmp_path, monkeypatch):
    broken = BrokenEngine(256)
    monkeypatch.setattr(TurbomindEngine, "logits", lambda self, ids: broken.logits(ids))
    with pytest.raises(TurbomillError, match="window 1"):
        evaluate_ppl(str(tiny), options, work_dir=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.status == "failed" and "window 1, position 7" in run.error and run.score is None


@pytest.mark.demo_model
def test_demo_model_equals_transformers():
    options = EvalOptions(windows=2, window_len=256, num_threads=2)
    run = evaluate_ppl("demo", options)
    checkpoint = open_checkpoint("demo")
    model = load_dense_model(checkpoint)
    nll = []
    with torch.inference_mode():
        for window in load_eval_windows(open_model("demo"), options).ids:
            log_p = model(input_ids=window[None]).logits[0].double().log_softmax(-1)
            nll.append(-log_p[:-1].gather(1, window[1:, None]).mean())
    assert run.score.ppl == pytest.approx(float(torch.stack(nll).mean().exp()), rel=1e-4)
