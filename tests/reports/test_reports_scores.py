"""The arithmetic against dense fp64 formulas."""

import math

import numpy as np
import pytest

from turbomill.reports.reference import STEP, make_reference
from turbomill.reports.scores import LogitsError, Tally, check_logits, score_window, worst


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
    assert result.nll == pytest.approx([-log_q[t, ids[t + 1]] for t in range(length - 1)], rel=1e-5, abs=1e-6)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    # A single position's error is random; the mean's bound is V * STEP^2 / 6, below 1e-8 here, and fp32.
    assert result.kl == pytest.approx(kl, abs=1e-3, rel=1e-3)
    assert result.kl.mean() == pytest.approx(kl.mean(), abs=1e-5, rel=1e-4)
    assert (result.top1 == (p.argmax(-1) == q.argmax(-1))).all()
    for t in range(length):
        five = set(np.argsort(-q[t], kind="stable")[:5])
        assert result.top5[t] == len(five & set(np.argsort(-p[t], kind="stable")[:5])) / 5 or not spread


@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_divergence_from_itself_is_nothing(spread):
    p = logits(4, 200, 5000, spread)
    result = score_window(np.zeros(200, np.int64), p, make_reference(p))
    # What the cache's docstring states: V * STEP^2 / 6, and fp32.
    assert abs(result.kl.mean()) < 5000 * STEP**2 / 6 + 5e-7
    assert result.top1.all() and (result.top5 == 1).all()


def test_cache_keeps_small_divergences():
    """A candidate close to the reference, over a vocabulary and a range as of a real model."""
    p = logits(5, 64, 50_000, 3.0)
    p[:, 7] += 25
    q = p + logits(6, 64, 50_000, 0.05)
    log_p, log_q = log_softmax(p), log_softmax(q)
    exact = (np.exp(log_p) * (log_p - log_q)).sum() / 64
    assert 0 < exact < 0.01
    reference = make_reference(p)
    result = score_window(np.zeros(64, np.int64), q, reference)
    assert result.kl.mean() == pytest.approx(exact, abs=2e-6)
    # Smaller than the 16 bits an entry that its roots have, by half.
    assert sum(map(len, reference.chunks)) < 0.5 * 2 * p.size


def test_flat_distributions_are_within_the_stated_error():
    """The worst case for the roots: 150,000 tokens, none of them likely."""
    p = logits(8, 4, 150_000, 0.3)
    q = p + logits(9, 4, 150_000, 0.02)
    log_p, log_q = log_softmax(p), log_softmax(q)
    exact = (np.exp(log_p) * (log_p - log_q)).sum() / 4
    result = score_window(np.zeros(4, np.int64), q, make_reference(p))
    assert result.kl.mean() == pytest.approx(exact, abs=150_000 * STEP**2 / 6 + 1e-6)


def test_positions_before_the_first_do_not_count():
    """Two windows of 20 with a stride of 8 score the tokens of one window of 28, each once."""
    ids, p, q = np.arange(28), logits(1, 28, 40), logits(2, 28, 40)
    parts = [
        score_window(ids[a : a + 20], q[a : a + 20], make_reference(p[a : a + 20]), first)
        for a, first in ((0, 0), (8, 12))
    ]
    whole = score_window(ids, q, make_reference(p))
    for name in ("kl", "top1", "top5"):
        assert np.concatenate([r.scored(name) for r in parts]) == pytest.approx(whole.scored(name))
    assert np.concatenate([r.scored_nll for r in parts]) == pytest.approx(whole.nll)
    both = Tally(parts).score()
    assert both.positions == 28 and both.per_window.tokens == [19, 8]
    assert (both.ppl, both.kl) == pytest.approx((Tally([whole]).score().ppl, whole.kl.mean()))


def test_worst_windows_come_first():
    ids = np.arange(10)
    p = [logits(seed, 10, 50) for seed in range(4)]
    spreads = zip(p, (1, 3, 0, 2), strict=True)
    results = [score_window(ids, x + logits(9, 10, 50, s), make_reference(x)) for x, s in spreads]
    assert worst(Tally(results).score().per_window) == [1, 3, 0]
    plain = Tally([score_window(ids, x, None) for x in p]).score().per_window
    assert worst(plain, 4) == sorted(range(4), key=lambda i: -plain.nll[i])


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
