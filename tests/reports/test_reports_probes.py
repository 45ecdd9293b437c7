"""Passkey and copying: built to length, and scored as greedy decoding would be."""

import numpy as np
import pytest
from reports_models import byte_tokenizer

from turbomill.reports.probes import DEPTHS, Probe, copying, passkey, run_probes


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


class Oracle:
    """Says the text's own next token, but for the tokens at which `wrong(position, token)`."""

    def __init__(self, wrong=lambda position, token: False):
        self.wrong, self.seen = wrong, []

    async def logits(self, ids):
        self.seen.append(list(ids))
        out = np.zeros((len(ids), 256), np.float32)
        for t in range(len(ids) - 1):
            out[t, (ids[t + 1] + self.wrong(t + 1, ids[t + 1])) % 256] = 1
        return out


@pytest.mark.parametrize("length", [256, 300, 1000])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_passkey_lies_where_it_should(tokenizer, length, depth):
    probe = passkey(tokenizer, length, depth, 5)
    text = tokenizer.decode(probe.ids)
    (answer,) = probe.answers
    key = tokenizer.decode(probe.ids[answer]).strip()
    assert len(probe.ids) == length == answer.stop and len(key) == 5 and key.isdigit()
    assert text.endswith(f"The pass key is {key}") and text.count(key) == 3
    if length == 1000:
        assert text.index(key) / length == pytest.approx(0.15 + 0.75 * depth, abs=0.1)
    assert passkey(tokenizer, length, depth, 6).ids != probe.ids


def test_copying_asks_for_every_line_but_the_first(tokenizer):
    probe = copying(tokenizer, 500, 3)
    lines = tokenizer.decode(probe.ids).split("\n")
    half = lines.index("The same lines again, exactly:")
    assert 350 < len(probe.ids) <= 500 and lines[: half - 1] == lines[half + 1 : -1]
    asked = [tokenizer.decode(probe.ids[answer]) for answer in probe.answers]
    assert asked == [line[2:] + "\n" for line in lines[1 : half - 1]]


def test_no_room_is_no_task(tokenizer):
    assert passkey(tokenizer, 60, 0.5, 0) is None and copying(tokenizer, 60, 0) is None
    assert run_probes(Oracle(), tokenizer, 60, 1) == run_probes(Oracle(), tokenizer, 20, 1)
    assert run_probes(Oracle(), tokenizer, 60, 1).passkey is None


def test_scores_of_known_answers(tokenizer):
    right = run_probes(Oracle(), tokenizer, 400, 2)
    assert (right.passkey, right.copy) == (1, 1)
    digits = set(tokenizer("0123456789")["input_ids"])
    blind = run_probes(Oracle(lambda _, token: token in digits), tokenizer, 400, 2)
    assert (blind.passkey, blind.copy) == (0, 0)
    engine = Oracle()
    run_probes(engine, tokenizer, 400, 2)
    assert len(engine.seen) == 2 * len(DEPTHS) + 2 and len({tuple(ids) for ids in engine.seen}) == 8


def test_one_wrong_token_loses_its_line_alone():
    probe = Probe(list(range(10, 30)), (slice(5, 8), slice(8, 12), slice(15, 20)))

    def say(wrong):
        out = np.zeros((20, 64), np.float32)
        for t in range(19):
            out[t, probe.ids[t + 1] + (t + 1 in wrong)] = 1
        return probe.score(out)

    assert say([]) == 1 and say([9]) == pytest.approx(2 / 3) and say([4, 12, 14]) == 1
    assert say([7, 8, 15]) == 0


async def test_teacher_forcing_equals_greedy_decoding(tokenizer):
    """A model whose next token depends on all before it: decoded step by step, and in one pass."""

    async def logits(ids):
        out = np.zeros((len(ids), 256), np.float32)
        for t in range(len(ids)):
            out[t, (sum(ids[: t + 1]) * 7 + t) % 256] = 1
        return out

    prompt = [3, 5, 8, 13]
    decoded = list(prompt)
    for _ in range(4):
        decoded.append(int((await logits(decoded))[-1].argmax()))
    whole = await logits(decoded)
    assert Probe(decoded, (slice(4, 8),)).score(whole) == 1
    decoded[6] += 1
    assert Probe(decoded, (slice(4, 8),)).score(await logits(decoded)) == 0
