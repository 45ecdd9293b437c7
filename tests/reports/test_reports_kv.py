"""`evaluate_kv` on a tiny model."""

import pytest

from turbomill.engine.stores import open_model
from turbomill.reports.evaluation import EvalOptions
from turbomill.reports.kv import bytes_per_token, decode_load, evaluate_kv
from turbomill.reports.runs import load_run

pytest.importorskip("turbomill._core")


def test_policies(tiny, text_file, tmp_path):
    options = EvalOptions(str(text_file), windows=2, window_len=128, num_threads=2, cache=tmp_path / "cache")
    run = evaluate_kv(str(tiny), options, rounds=1, work_dir=tmp_path / "run")
    wide, byte, nibble = run.policies
    assert [p.name for p in run.policies] == ["16", "8", "4"]
    assert abs(wide.kl) < 1e-6 and 0 < byte.kl < nibble.kl and wide.top1 == 1
    assert wide.bits_per_token > byte.bits_per_token > nibble.bits_per_token
    assert all(p.decode_tok_s > 0 and p.ppl > 1 for p in run.policies)
    assert load_run(tmp_path / "run") == run


def test_another_reference(tiny, tiny_rtn, text_file, tmp_path):
    options = EvalOptions(str(text_file), windows=1, window_len=64, num_threads=2, cache=tmp_path / "cache")
    run = evaluate_kv(str(tiny_rtn), options, policies=(0,), rounds=1, reference=str(tiny))
    assert run.policies[0].kl > 1e-3


def test_bytes_per_token_by_hand(tiny):
    """2 layers, K and V, 2 heads of 16: fp16; or codes and a 16-bit scale and zero for each head."""
    store = open_model(tiny)
    values = 2 * 2 * 2
    assert bytes_per_token(store, 0) == values * 16 * 2
    assert bytes_per_token(store, 0, "float32") == values * 16 * 4
    assert bytes_per_token(store, 8) == values * (16 + 4)
    assert bytes_per_token(store, 4) == values * (8 + 4)


@pytest.mark.parametrize("length", [2, 3, 50, 96, 4096])
def test_decode_measurement_fits_the_session(tiny_store, length):
    load = decode_load(tiny_store, max(length, 3))
    assert load.prompt_tokens + load.completion_tokens <= min(max(length, 3), 256)
