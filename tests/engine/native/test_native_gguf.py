"""GGUF files of every architecture, file -> store -> engine, against transformers on what the file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import CASES
from gguf import GGMLQuantizationType as Q
from gguf_models import ARCHS, CHANGES, joined_qkv, write_model
from native_engine import Native

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import convert_checkpoint

IDS = np.random.default_rng(3).integers(3, 320, 150).tolist()  # beyond the original context of phi3-long


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def engine_logits(path: Path, dst: Path, **config: Any) -> np.ndarray:
    with Native(convert_checkpoint(path, dst), **config) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("name", ARCHS)
def test_logits_equal_the_converted_models(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.make(tmp_path / "dense", **CHANGES.get(name, {}))
    write_model(tmp_path / "m.gguf", name, tmp_path / "dense", model.config)
    expected = logits_of(model)
    assert np.abs(expected).max() > 0.5
    found = engine_logits(tmp_path / "m.gguf", tmp_path / "store", session_len=case.session_len)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)


def test_q_k_and_v_in_one_tensor(tmp_path: Path) -> None:
    model = CASES["glm"].make(tmp_path / "dense")
    write_model(tmp_path / "m.gguf", "glm", tmp_path / "dense", model.config, change=joined_qkv)
    found = engine_logits(tmp_path / "m.gguf", tmp_path / "store")
    np.testing.assert_allclose(found, logits_of(model), atol=1e-3, rtol=0)


def mixed(name: str) -> Q:
    """Q4_0 fused with Q4_1, two kinds alone, and one that is dense."""
    kinds = {"attn_v": Q.Q4_1, "ffn_down": Q.Q4_0, "ffn_up": Q.Q4_1, "attn_output": Q.Q8_0}
    return next((kind for part, kind in kinds.items() if part in name), Q.Q4_0)


@pytest.mark.parametrize("name", ARCHS)
def test_4_bit_blocks_are_served_as_codes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.make(tmp_path / "dense", **CHANGES.get(name, {}))
    path = tmp_path / "m.gguf"
    write_model(path, name, tmp_path / "dense", model.config, mixed)
    store = convert_checkpoint(path, tmp_path / "store")
    layouts = {key.partition(".")[2].partition(".")[2]: t.layout for key, t in store.tensors.items()}
    assert layouts["w_qkv.qweight"] == "w4.n64k64" and layouts["w_o.qweight"] == "w8.n64k64"
    fused = ARCHS[name].name in ("PHI3", "CHATGLM", "GLM4")  # gate and up, and in Phi-3 q, k and v, in one
    assert ("w_qkv.mins" in layouts) == (name not in ("phi3", "phi3-long"))
    assert fused or any(key.endswith("w_gate_up.mins") for key in layouts)
    assert any(key.endswith("w_down.scales") for key in layouts)
    assert not any(key.endswith("w_down.mins") for key in layouts)
    expected = logits_of(load_dense_model(open_checkpoint(path)))
    for budget in (512, 5):
        with Native(store, session_len=case.session_len, max_prefill_token_num=budget) as engine:
            np.testing.assert_allclose(engine.logits(IDS), expected, atol=2e-3, rtol=0)
