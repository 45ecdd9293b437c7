"""Random edits of a row of logits, for the CPU's and the GPU's tests."""

from __future__ import annotations

import numpy as np


def random_rules(rng: np.random.Generator, vocab: int) -> dict:
    tokens = rng.choice(vocab, min(vocab, 12), replace=False).tolist()
    edits = [
        (t, int(rng.integers(0, 4)), float(rng.normal()), bool(rng.random() < 0.5), bool(rng.random() < 0.2))
        for t in tokens
    ]
    last = int(rng.integers(vocab))
    return {
        "repetition": float(rng.uniform(0.5, 2)),
        "presence": float(rng.normal()),
        "frequency": float(rng.normal()),
        "edits": edits,
        "bans": [(last, int(rng.integers(vocab))), ((last + 1) % vocab, int(rng.integers(vocab)))],
        "allowed": rng.choice(vocab, vocab // 2, replace=False).tolist() if rng.random() < 0.5 else [],
        "last": last,
        "last_unknown": bool(rng.random() < 0.5),
    }
