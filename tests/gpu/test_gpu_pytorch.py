"""The PyTorch engine on the GPU: logits and texts beside transformers' own, in fp32 on the CPU and in the
engine's type on the GPU; what does not fit; memory that is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_tolerance
import numpy as np
import pytest
import torch
from architectures import CASES
from torch_models import OWN, PAGED, engine, logits_of, make, text
from transformers import AutoConfig, AutoModelForCausalLM

from turbomill.convert.reference import attention_implementation
from turbomill.engine.config import GenerationConfig
from turbomill.engine.requests import EngineError

REGISTERED = ["gemma2", "mistral-window", "qwen3", "qwen3-moe"]
IN_EVERY_TYPE = ["gemma2", "qwen3-moe", "gpt2", "gpt_oss", "deepseek_v3"]
EXPERTS = ("gpt_oss", "deepseek_v3", "qwen3-moe")
# Of a greedy token's logit, beside the largest one.
SLACK = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


def save(kind: str, path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint of a case; its model in fp32."""
    return CASES[kind].make(path, dtype) if kind in CASES else make(kind, path, dtype)


def logits_on_gpu(path: Path, dtype: torch.dtype, ids: list[int]) -> np.ndarray:
    """Transformers' own, [T, V]."""
    capped = attention_implementation(AutoConfig.from_pretrained(path)) == "eager"  # as the engine loads it
    attention = "eager" if capped else None
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    model.to("cuda").eval()
    with torch.inference_mode():
        return model(torch.tensor([ids], device="cuda")).logits[0].float().cpu().numpy()


async def generate(engine: Any, prompt: list[int], count: int) -> list[int]:
    outputs = engine.generate(prompt, GenerationConfig(max_new_tokens=count, ignore_eos=True))
    return [token async for output in outputs for token in output.token_ids]


async def generate_all(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    return await asyncio.gather(*[generate(engine, prompt, count) for prompt in prompts])


def agree(engine: Any, model: Any, path: Path, ids: list[int], dtype: str, flips: bool) -> None:
    """Logits, and texts of sequences of several lengths together."""
    expected = logits_of(model, ids)
    assert np.abs(expected).max() > 0.5  # logits that say something
    found = asyncio.run(engine.logits(ids))
    bound = gpu_tolerance.LOGITS[dtype]
    gpu_tolerance.assert_logits(found, expected, bound, flips)
    if dtype != "float32":
        theirs = logits_on_gpu(path, gpu_tolerance.TORCH[dtype], ids)
        gpu_tolerance.assert_logits(found, theirs, bound, flips)
    prompts = [ids[:length] for length in (5, 33, 48, len(ids))]
    behind = []
    for prompt, tokens in zip(prompts, asyncio.run(generate_all(engine, prompts, 8)), strict=True):
        own = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1]
        behind += (own.max(1) - own[np.arange(8), tokens]).tolist()
    slack = SLACK[dtype] * float(np.abs(expected).max())
    assert (np.quantile(behind, 0.75) if flips else max(behind)) <= slack


@pytest.mark.parametrize("dtype", gpu_tolerance.TORCH)
@pytest.mark.parametrize("kind", IN_EVERY_TYPE)
def test_logits_equal_transformers(kind: str, dtype: str, tmp_path: Path) -> None:
    """Whole prompts, chunks, and decodes in a batch, over the paged cache on the device."""
    check(kind, dtype, tmp_path, (512, 37) if dtype == "float32" else (37,))


@pytest.mark.parametrize("kind", sorted({*REGISTERED, *PAGED} - {*IN_EVERY_TYPE}))
def test_other_families(kind: str, tmp_path: Path) -> None:
    check(kind, "float32", tmp_path, (37,))


def check(kind: str, dtype: str, tmp_path: Path, budgets: tuple[int, ...]) -> None:
    """By each budget of a step's prompt tokens."""
    model = save(kind, tmp_path, gpu_tolerance.TORCH[dtype])
    flips = kind in EXPERTS and dtype != "float32"
    for budget in budgets:
        with engine(tmp_path, device="cuda", max_prefill_token_num=budget) as e:
            assert (e.info.backend, e.info.kv_cache) == ("cuda:0", dtype)
            agree(e, model, tmp_path, text(90), dtype, flips)


@pytest.mark.parametrize("kind", OWN)
def test_families_with_transformers_own_caches(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    with engine(tmp_path, device="cuda") as e:
        assert e.info.backend == "cuda:0"
        assert "own caches" in e.info.kv_cache
        expected = logits_of(model, text(90))
        found = asyncio.run(e.logits(text(90)))
        # Convolutions over tokens are in TF32 there, as in transformers.
        gpu_tolerance.assert_logits(found, expected, 1e-3 if kind in ("mamba", "lfm2") else 1e-5)
        assert len(asyncio.run(generate(e, text(20), 8))) == 8


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and activations of megabytes."""
    path: Path = tmp_path_factory.mktemp("wide") / "llama"
    make("llama", path, intermediate_size=16384)
    return path


@pytest.fixture
def small_gpu() -> Iterator[Any]:
    """Call it, and PyTorch gets no more of the GPU than it holds."""

    def shrink() -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6)

    yield shrink
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_cache_that_does_not_fit(wide: Path) -> None:
    says = r"the KV cache needs \d{12,} bytes on cuda:0, where \d+ are free: lower --cache-max-entry-count"
    config = {"cache_max_entry_count": 10**8, "max_batch_size": 10**8}
    with pytest.raises(EngineError, match=says), engine(wide, device="cuda", **config):
        pass


def test_weights_that_do_not_fit(wide: Path, small_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"its weights as float32 needs \d+ bytes on cuda:0, where \d+ are free: use a smaller model"
    small_gpu()
    with pytest.raises(EngineError, match=says), engine(wide, device="cuda"):
        pass
    torch.cuda.set_per_process_memory_fraction(1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**9))
    with pytest.raises(EngineError, match=says.replace(r"\d+ are", "1000 are")), engine(wide, device="cuda"):
        pass


def test_a_step_without_room_fails_its_requests(wide: Path, small_gpu: Any) -> None:
    with engine(wide, device="cuda", max_prefill_token_num=512) as e:
        expected = asyncio.run(generate(e, text(20), 8))
        small_gpu()
        with pytest.raises(EngineError, match=r"Tried to allocate .* Lower --max-prefill-token-num") as error:
            asyncio.run(generate(e, text(240), 8))
        assert "\n" not in str(error.value)
        assert not e.metrics().healthy
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert asyncio.run(generate(e, text(20), 8)) == expected


def test_sleep_and_close_give_the_gpu_its_memory_back(wide: Path) -> None:
    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    with engine(wide, device="cuda", cache_max_entry_count=2**17, max_batch_size=2**14) as e:  # a gigabyte
        expected = asyncio.run(generate(e, text(60), 20))
        held = free()
        e.sleep(2)
        assert free() - held > 2**29  # other tests may share the GPU
        e.wakeup()
        assert asyncio.run(generate(e, text(60), 20)) == expected
        held = free()
    assert free() - held > 2**29
