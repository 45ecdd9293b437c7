"""`evaluate_ppl` on the native engine, against transformers on the same windows."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from reports_models import make_model

from turbomill.calib_data import Windows
from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.engine.kv_scheme import KvScheme
from turbomill.engine.stores import open_model
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports import evaluation
from turbomill.reports.evaluation import EvalOptions, References, score
from turbomill.reports.perplexity import evaluate_ppl
from turbomill.reports.runs import load_run
from turbomill.reports.text import TextOptions, load_eval_windows

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
    assert 0 <= run.score.top1 <= 1 and run.score.top1 - 0.3 < run.score.top5 <= 1
    low, high = run.score.ppl_ci
    assert low < run.score.ppl < high and run.score.kl_ci[0] < run.score.kl < run.score.kl_ci[1]
    kls = run.score.per_window.kl
    assert [w.index for w in run.score.worst] == sorted(range(3), key=lambda i: -kls[i])
    shown = open_model(tiny).tokenizer().decode(ids[run.score.worst[0].index].tolist())
    assert " ".join(shown.split()).startswith(run.score.worst[0].text[:20])
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
    kl = [evaluate_ppl(str(tiny), options, reference=str(tiny), kv=KvScheme(p)).score.kl for p in (8, 4)]
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


def test_a_store_of_another_model_is_refused(tiny, options, tmp_path):
    """The tokens are the same, the model is not."""
    other = make_model(tmp_path / "other", num_hidden_layers=3)
    told = r"--reference .*is another model \(LlamaForCausalLM, 3 layers of 64, .*2 layers of 64.*--force"
    with pytest.raises(UsageError, match=told):
        evaluate_ppl(str(tiny), options, reference=str(other))
    forced = replace(options, force=True)
    assert evaluate_ppl(str(tiny), forced, reference=str(other)).score.kl > 0


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
    for name in ("self", "free"):
        with pytest.raises(UsageError, match=f"--dataset {name}"):
            evaluate_ppl(str(tiny), EvalOptions(name, window_len=100))


class BrokenEngine:
    def __init__(self, vocab):
        self.vocab, self.calls = vocab, 0

    async def logits(self, token_ids):
        out = np.zeros((len(token_ids), self.vocab), np.float32)
        out[7] = np.nan if self.calls == 1 else 0
        self.calls += 1
        return out


def test_the_calibrations_own_text_is_refused(tiny, text_file, tmp_path):
    """Known by its path, by its folder, or by the windows in it."""
    from turbomill.quant import QuantOptions, quantize

    folder = tmp_path / "texts"
    folder.mkdir()
    text = folder / "text.txt"
    text.write_bytes(text_file.read_bytes())
    work_dir = tmp_path / "awq"
    options = QuantOptions(group=64, calib_dataset=str(text), calib_samples=2, calib_seqlen=64)
    quantize(tiny, work_dir, "awq", options)
    for name in (text, folder, text_file):
        for model in (work_dir, open_model(work_dir).path):
            with pytest.raises(UsageError, match=r"--dataset .*calibrated on this text.*--force"):
                evaluate_ppl(str(model), EvalOptions(str(name), windows=2, window_len=64))
    forced = EvalOptions(str(text), windows=2, window_len=64, force=True, cache=tmp_path / "cache")
    assert evaluate_ppl(str(work_dir), forced).score.kl > 0
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    made = json.loads((work_dir / "turbomill.json").read_text())["calibration"]
    load_eval_windows(open_model(work_dir), EvalOptions(str(other), windows=2, window_len=64), made)


def test_all_windows_follow_one_another_as_in_the_papers(tiny_store, text_file):
    """GPTQ's evaluation: the text's ids, its beginning first, cut into windows that do not overlap."""
    cut = load_eval_windows(tiny_store, TextOptions(str(text_file), windows=None, window_len=128))
    ids = tiny_store.tokenizer()(text_file.read_text())["input_ids"]
    count = len(ids) // 128
    assert count > 10 and cut.ids.tolist() == [ids[i * 128 : (i + 1) * 128] for i in range(count)]
    assert {cut.first(i) for i in range(count)} == {0}


def test_the_papers_text_begins_as_the_tokenizer_begins_one(tiny_store, text_file, monkeypatch):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_store.tokenizer()
    start = tokenizer.convert_ids_to_tokens(7)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, 7)]
    )
    monkeypatch.setattr(type(tiny_store), "tokenizer", lambda self: tokenizer)
    papers = load_eval_windows(tiny_store, TextOptions(str(text_file), windows=None, window_len=64)).ids
    spread = load_eval_windows(tiny_store, TextOptions(str(text_file), windows=1, window_len=64)).ids
    assert papers[0].tolist() == [7, *spread[0, :-1].tolist()] and 7 not in papers[1:]


def test_a_stride_scores_every_token_once_with_more_context(tiny, options, text_file):
    strided = EvalOptions(
        str(text_file), windows=3, window_len=100, stride=40, num_threads=2, cache=options.cache
    )
    run = evaluate_ppl(str(tiny), strided, reference=str(tiny))
    assert run.score.positions == 100 + 2 * 40 and run.score.per_window.tokens == [99, 40, 40]
    ids = load_eval_windows(open_model(tiny), strided).ids
    model = load_dense_model(open_checkpoint(tiny))
    losses = []
    with torch.inference_mode():
        for i, window in enumerate(ids):
            log_p = model(input_ids=window[None]).logits[0].double().log_softmax(-1)
            nll = -log_p[:-1].gather(1, window[1:, None])[:, 0]
            losses.append(nll if i == 0 else nll[-40:])
    assert run.score.ppl == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "option"),
    [({"windows": 0}, "--windows 0"), ({"window_len": 1}, "--window-len"), ({"stride": 65}, "--stride 65")],
)
def test_options_are_checked(changes, option):
    with pytest.raises(UsageError, match=option):
        TextOptions(**{"window_len": 64, **changes})


def test_a_damaged_cache_is_named(tiny_store, options):
    references = References(tiny_store, load_eval_windows(tiny_store, options), options)
    references.prepare()
    file = references._cache.path / "1" / "roots.zst"
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(TurbomillError, match=r"1: damaged.*delete it"):
        references[1]
    (file.parent / "index.npz").write_bytes(b"")
    with pytest.raises(TurbomillError, match="1: unreadable"):
        references[1]
    assert references[0].vocab == 256


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
