"""Windows: exactly the published cut, and what happens when there is too little text."""

import logging

import pytest
import torch

from turbomill.calib_data import windows
from turbomill.calib_data.windows import MIN_TOKENS, Windows, fingerprint
from turbomill.errors import TurbomillError


@pytest.mark.parametrize(
    ("total", "n", "length"), [(1000, 7, 64), (64, 1, 64), (129, 2, 64), (5000, 24, 100)]
)
def test_windows_are_cut_at_equal_steps(total, n, length):
    ids = torch.randint(0, 1000, (total,))
    cut = windows(ids, n, length)
    step = len(ids) // n
    assert cut.shape == (n, length)
    for i in range(n):
        assert cut[i].tolist() == ids.tolist()[i * step : i * step + length]


def test_short_text_gives_fewer_windows_that_do_not_overlap(caplog):
    caplog.set_level(logging.WARNING, "turbomill")
    logging.getLogger("turbomill").propagate = True
    cut = windows(torch.arange(250), 8, 100)
    assert cut.shape == (2, 100) and len(set(cut.flatten().tolist())) == 200
    assert "250 tokens make 2 windows of 100 tokens, not the 8 asked for" in caplog.text


def test_text_shorter_than_a_window_is_one_short_window(caplog):
    caplog.set_level(logging.WARNING, "turbomill")
    logging.getLogger("turbomill").propagate = True
    assert windows(torch.arange(50), 8, 100).tolist() == [list(range(50))]
    assert "only 50 tokens" in caplog.text


@pytest.mark.parametrize("total", [0, 1, MIN_TOKENS - 1])
def test_next_to_nothing_is_refused(total):
    with pytest.raises(TurbomillError, match=rf"notes\.txt: {total} tokens") as caught:
        windows(torch.arange(total), 4, 128, source="notes.txt")
    assert "\n" not in str(caught.value)


def test_fingerprint_names_ids_and_shape():
    ids = torch.arange(24).reshape(4, 6)
    assert fingerprint(ids) == fingerprint(ids.clone().int())
    assert len({fingerprint(x) for x in (ids, ids.reshape(6, 4), ids + 1)}) == 3


def test_batches_keep_order_and_lose_nothing():
    made = Windows(torch.arange(35).reshape(7, 5), "builtin", "calibration", "x")
    assert [len(b) for b in made.batches(3)] == [3, 3, 1]
    assert torch.equal(torch.cat(made.batches(3)), made.ids)
    assert made.describe() == {
        "source": "builtin", "split": "calibration", "windows": 7, "length": 5, "sha256": "x",
    }  # fmt: skip
