"""The arithmetic against dense fp64 formulas."""

import math

import numpy as np
import pytest

from turbomill.reports.scores import LogitsError, Tally, check_logits, make_reference, score_window


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def logits(seed, length, vocab, spread=4.0):
    return (np.random.default_rng(seed).standard_normal((length, vocab)) * spread).astype(np.float32)


@pytest.mark.parametrize("length", [2, 127, 128, 129, 300])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_window_against_dense_formulas(length, spread):
    ids = np.random.default_rng(1).integers(0, 97, length)
    p, q = logits(2, length, 97, spread), logits(3, length, 97, spread)
    result = score_window(ids, q, make_reference(p))
    log_p, log_q = log_softmax(p), log_softmax(q)
    assert result.nll == pytest.approx(-sum(log_q[t, ids[t + 1]] for t in range(length - 1)), rel=1e-6)
    kl = (np.exp(log_p) * (log_p - log_q)).sum()
    assert result.kl / length == pytest.approx(kl / length, abs=1e-5, rel=1e-4)
    assert result.top1 == (p.argmax(-1) == q.argmax(-1)).sum()
    assert result.tokens == length


@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_divergence_from_itself_is_nothing(spread):
    p = logits(4, 200, 5000, spread)
    result = score_window(np.zeros(200, np.int64), p, make_reference(p))
    assert abs(result.kl) / 200 < 1e-6 and result.top1 == 200


def test_cache_keeps_small_divergences():
    """A candidate close to the reference, over a vocabulary and a range as of a real model."""
    p = logits(5, 64, 50_000, 3.0)
    p[:, 7] += 25
    q = p + logits(6, 64, 50_000, 0.05)
    log_p, log_q = log_softmax(p), log_softmax(q)
    exact = (np.exp(log_p) * (log_p - log_q)).sum() / 64
    assert 0 < exact < 0.01
    result = score_window(np.zeros(64, np.int64), q, make_reference(p))
    assert result.kl / 64 == pytest.approx(exact, abs=1e-5)


def test_without_a_reference():
    q = logits(0, 10, 50)
    result = score_window(np.arange(10), q, None)
    assert result.kl is None and result.top1 is None
    tally = Tally([result])
    assert tally.score().kl is None and tally.score().per_window.kl is None


def test_perplexity_counts_every_predicted_token():
    tally = Tally()
    expected = []
    for seed, length in ((0, 10), (1, 30)):
        ids, q = np.arange(length), logits(seed, length, 64)
        tally.results.append(score_window(ids, q, make_reference(q)))
        expected += [-log_softmax(q)[t, ids[t + 1]] for t in range(length - 1)]
    score = tally.score()
    assert score.ppl == pytest.approx(math.exp(np.mean(expected)), rel=1e-6)
    assert score.positions == 40 and len(score.per_window.nll) == 2 and score.top1 == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_logits_are_named(value):
    bad = logits(0, 300, 20)
    bad[200, 3] = value
    with pytest.raises(LogitsError, match=r"awq: window 5, position 200: .*NaN or inf"):
        check_logits(bad, 5, "awq")
    check_logits(logits(0, 300, 20), 0, "fine")
