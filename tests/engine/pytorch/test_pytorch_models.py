"""Logits and texts of PytorchEngine beside transformers' own forward: prefill, chunks, decodes in a batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import CASES
from gguf_models import write_model
from quantized_models import quantized
from safetensors.torch import load_file, save_file
from torch_models import OWN, PAGED, engine, logits_of, make, text

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.convert.store import convert_checkpoint
from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.pytorch.engine import PytorchEngine
from turbomill.engine.pytorch.records import Request, Sequence, Slice
from turbomill.engine.pytorch.runner import OwnCacheRunner
from turbomill.errors import CheckpointError, UnsupportedModelError


async def generate(engine: Any, prompt: list[int], count: int) -> list[int]:
    outputs = engine.generate(prompt, GenerationConfig(max_new_tokens=count, ignore_eos=True))
    return [token async for output in outputs for token in output.token_ids]


async def generate_all(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    return await asyncio.gather(*[generate(engine, prompt, count) for prompt in prompts])


def agree(engine: Any, model: Any, ids: list[int], lengths: tuple[int, ...] = (5, 33, 48)) -> None:
    """Logits of chunks, and texts of several sequences of different lengths, are the model's own."""
    expected = logits_of(model, ids)
    assert np.abs(expected).max() > 0.5  # logits that say something
    np.testing.assert_allclose(asyncio.run(engine.logits(ids)), expected, atol=1e-3, rtol=0)
    prompts = [ids[:length] for length in (*lengths, len(ids))]
    for prompt, tokens in zip(prompts, asyncio.run(generate_all(engine, prompts, 8)), strict=True):
        own = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1]
        # The greedy token, or one whose logit rounding makes equal to it.
        assert np.all(own.max(1) - own[np.arange(8), tokens] < 1e-3)


@pytest.mark.parametrize("kind", PAGED)
def test_unregistered_families_over_paged_attention(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    with engine(tmp_path) as e:
        assert e.info.kv_cache == "float32"
        agree(e, model, text(90))


@pytest.mark.parametrize("kind", OWN)
def test_other_families_with_transformers_own_caches(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    with engine(tmp_path) as e:
        assert "own caches, one sequence after the other" in e.info.kv_cache
        agree(e, model, text(90))
    with pytest.raises(UnsupportedModelError, match="--strict"), engine(tmp_path, strict=True):
        pass


@pytest.mark.parametrize("name", CASES)
def test_registered_architectures(name: str, tmp_path: Path) -> None:
    """Caps and windows, local RoPE, names of remote code, experts: through turbomill.convert's readers."""
    case = CASES[name]
    model, ids = case.make(tmp_path / "model"), text(min(150, case.session_len - 24))
    with engine(tmp_path / "model", session_len=case.session_len) as e:
        # transformers' longrope goes by the length of each text, an engine's by that of a session.
        lengths = (len(ids) - 1,) if name == "phi3-long" else (5, 33, 48)
        agree(e, model, ids, lengths)


def test_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    dense = CASES["qwen2"].make(tmp_path / "dense")
    path = quantized(tmp_path / "dense", AwqFormat(QuantScheme(4, 32, False)), torch.float16)
    model = load_dense_model(open_checkpoint(path))
    assert np.abs(logits_of(model, text(9)) - logits_of(dense, text(9))).max() > 0.05
    with engine(path) as e:
        assert e.source.scheme is not None and e.source.scheme.startswith("awq")
        agree(e, model, text(90))
    store = convert_checkpoint(path, tmp_path / "store")
    with engine(store.path) as e:
        np.testing.assert_allclose(asyncio.run(e.logits(text(90))), logits_of(model, text(90)), atol=1e-3)


def test_gguf_files_of_registered_architectures(tmp_path: Path) -> None:
    dense = CASES["qwen2"].make(tmp_path / "dense")
    write_model(tmp_path / "m.gguf", "qwen2", tmp_path / "dense", dense.config)
    model = load_dense_model(open_checkpoint(tmp_path / "m.gguf"))
    with engine(tmp_path / "m.gguf") as e:
        agree(e, model, text(90))


def test_longrope_is_chosen_by_the_session(tmp_path: Path) -> None:
    """And not by the longest text in the batch, as transformers does."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    model = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    short = logits_of(model, text(40))
    with engine(tmp_path, session_len=64) as e:
        np.testing.assert_allclose(asyncio.run(e.logits(text(40))), short, atol=1e-3)
    with engine(tmp_path, session_len=256) as e:
        alone = asyncio.run(e.logits(text(40)))
        assert np.abs(alone - short).max() > 0.05
        whole = asyncio.run(e.logits(text(90)))
        np.testing.assert_allclose(whole, logits_of(model, text(90)), atol=1e-3)
        np.testing.assert_allclose(whole[:40], asyncio.run(e.logits(text(90)[:40])), atol=1e-3)


def test_what_attention_cannot_do_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose code ignores a part of the flat batch runs on transformers' caches, and right."""
    from transformers.models.olmo2 import modeling_olmo2

    plain = modeling_olmo2.Olmo2MLP.forward

    def mixes_tokens(self: Any, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([x[:, :1], x[:, :-1]], 1) if x.shape[1] > 1 else x
        return plain(self, x + shifted)

    path = tmp_path / "olmo2"
    make("olmo2", path)
    with engine(path) as e:
        assert e.info.kv_cache == "float32"
    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", mixes_tokens)
    # Not even its own cache continues such a text.
    with pytest.raises(UnsupportedModelError, match=r"olmo2: .* does not continue a text"), engine(path):
        pass


class Adds:
    """The sum of the tokens so far, in a cache of the name that Mamba's had in older transformers."""

    device = torch.device("cpu")

    def __call__(self, **given: Any) -> Any:
        return self.forward(**given)

    def forward(self, input_ids: torch.Tensor, use_cache: bool, cache_params: Any = 0) -> Any:
        sums = cache_params + input_ids[0].cumsum(0)
        return SimpleNamespace(logits=sums[None, :, None], cache_params=sums[-1])


def test_a_cache_by_its_older_name() -> None:
    model: Any = Adds()
    runner = OwnCacheRunner(model, in_pieces=True)
    sequence = Sequence(0, Request(token_ids=[3, 4, 5, 6], max_new_tokens=1), None)
    pieces = [Slice(sequence, 0, [3, 4, 5], False, True), Slice(sequence, 3, [6], True, False)]
    assert [runner.run([piece])[0].flatten().tolist() for piece in pieces] == [[3, 7, 12], [18]]


def test_states_that_transformers_keeps_elsewhere_are_refused(tmp_path: Path) -> None:
    make("rwkv", tmp_path / "rwkv")
    with pytest.raises(UnsupportedModelError, match=r"rwkv: .*RwkvForCausalLM does not continue"):
        PytorchEngine(tmp_path / "rwkv", EngineConfig(session_len=64, device="cpu"))


def test_damaged_weights_are_told_at_the_start(tmp_path: Path) -> None:
    make("gpt2", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["transformer.ln_f.weight"][3] = torch.inf
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="its logits are not finite"), engine(tmp_path):
        pass
