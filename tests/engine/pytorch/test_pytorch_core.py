"""What happens when something goes wrong, and under control: seen through PytorchEngine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_models import engine, logits_of, make, text

from turbomill.engine.config import GenerationConfig
from turbomill.engine.pytorch.engine import PytorchEngine
from turbomill.engine.requests import EngineError, PromptError
from turbomill.errors import CheckpointError, TurbomillError, UnsupportedModelError, UsageError

BAD = 255  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("torch") / "llama"
    make("llama", path)
    return path


@pytest.fixture
def run(model: Path) -> Iterator[PytorchEngine]:
    with engine(model) as made:
        yield made


async def generate(engine: Any, prompt: list[int], count: int = 8, **fields: Any) -> list[int]:
    gen = GenerationConfig(max_new_tokens=count, ignore_eos=True, **fields)
    return [token async for output in engine.generate(prompt, gen) for token in output.token_ids]


async def test_a_step_that_fails_fails_its_requests_and_no_other(
    run: PytorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await generate(run, text(20))
    core: Any = run._engine
    plain = core._runner.run

    def broken(slices: Any) -> Any:
        if any(BAD in piece.tokens for piece in slices):
            raise RuntimeError("out of\nluck")
        return plain(slices)

    monkeypatch.setattr(core._runner, "run", broken)
    with pytest.raises(EngineError, match="the model failed: RuntimeError: out of luck"):
        await generate(run, [BAD] * 20)
    assert not run.metrics().healthy
    assert await generate(run, text(20)) == expected
    now = run.metrics()
    assert now.free_blocks + now.cached_blocks == now.total_blocks


async def test_what_fails_after_the_model_fails_alike(
    run: PytorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some of a step's sequences have ended, and the next one's token cannot be taken."""
    results: Any = run._engine._results  # type: ignore[attr-defined]
    plain = results._take_token

    def broken(sequence: Any, row: Any, token: Any, output: Any) -> None:
        if sequence.request.seed == 13:
            raise MemoryError("no room")
        plain(sequence, row, token, output)

    monkeypatch.setattr(results, "_take_token", broken)
    run.pause()
    jobs = [asyncio.ensure_future(generate(run, text(9), 1, seed=seed)) for seed in (1, 13, 2)]
    await asyncio.sleep(0.02)
    run.resume()
    first, second, third = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 10)
    assert isinstance(first, list) and len(first) == 1
    assert all(isinstance(e, EngineError) and "MemoryError: no room" in str(e) for e in (second, third))
    assert len(await generate(run, text(9))) == 8 and not run.metrics().healthy


async def test_logits_that_are_not_finite_fail_their_request_alone(model: Path, tmp_path: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.embed_tokens.weight"][BAD] = float("nan")
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path, enable_prefix_caching=False, cache_max_entry_count=20) as run:
        expected = await generate(run, text(20), 30)
        jobs = [generate(run, text(20), 30), generate(run, [*text(5), BAD], 30), generate(run, text(20), 30)]
        good, bad, also = await asyncio.gather(*jobs, return_exceptions=True)
        assert good == also == expected
        assert isinstance(bad, EngineError) and "not finite" in str(bad)
        # Its pages hold NaN now; who gets them next does not read it.
        many = await asyncio.gather(*[generate(run, text(20), 30) for _ in range(8)])
        assert many == [expected] * 8
        assert run.metrics().healthy


async def test_a_mistake_in_the_engine_leaves_nobody_waiting(
    run: PytorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core: Any = run._engine
    run.pause()
    jobs = [asyncio.ensure_future(generate(run, text(9))) for _ in range(3)]
    await asyncio.sleep(0.02)
    monkeypatch.setattr(core._scheduler, "plan", lambda: 1 / 0)
    run.resume()
    failed = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 10)
    assert all(isinstance(e, EngineError) and "ZeroDivisionError" in str(e) for e in failed)
    assert not run.metrics().healthy
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await generate(run, text(9))


async def test_a_step_that_hangs_is_told_from_an_idle_engine(
    run: PytorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core: Any = run._engine
    await generate(run, text(9))
    await asyncio.sleep(0.05)
    assert run.metrics().stalled_seconds == 0
    plain, go = core._runner.run, threading.Event()

    def hangs(slices: Any) -> Any:
        go.wait(10)
        return plain(slices)

    monkeypatch.setattr(core._runner, "run", hangs)
    task = asyncio.create_task(generate(run, text(9)))
    end = time.monotonic() + 10
    while run.metrics().stalled_seconds < 0.1:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    assert run.metrics().steps_in_flight == 1
    go.set()
    assert len(await task) == 8


async def test_sleep_gives_memory_back_and_only_wakeup_ends_it(run: PytorchEngine) -> None:
    expected = await generate(run, text(40), 20)
    core: Any = run._engine
    run.sleep(2)
    assert core._runner.model is None and not core._runner._caches
    with pytest.raises(EngineError, match="asleep"):
        run.resume()
    run.wakeup()
    assert await generate(run, text(40), 20) == expected


@pytest.mark.parametrize("state", ["running", "paused", "asleep"])
async def test_new_weights_without_a_new_engine(model: Path, tmp_path: Path, state: str) -> None:
    """What runs goes on; what comes after is of the new weights, whatever the prefix cache remembers."""
    torch.manual_seed(7)
    weights = load_file(model / "model.safetensors")
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(
        {k: v + 0.05 * torch.randn_like(v) for k, v in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with engine(tmp_path) as other:
        expected = await generate(other, text(60), 12)
    with engine(model) as run:
        before = await generate(run, text(60), 12)
        assert before != expected
        task = asyncio.create_task(generate(run, text(30, seed=1), 100))
        while not (run.metrics().running or task.done()):
            await asyncio.sleep(0.001)
        if state != "running":
            run.pause() if state == "paused" else run.sleep(2)
        await asyncio.to_thread(run.update_params, tmp_path)
        assert run.metrics().paused == (state != "running")
        if state != "running":
            run.resume() if state == "paused" else run.wakeup()
        assert await generate(run, text(60), 12) == expected
        assert len(await task) == 100


async def test_new_weights_must_be_of_the_same_form(run: PytorchEngine, model: Path, tmp_path: Path) -> None:
    make("llama", tmp_path / "wide", intermediate_size=96)
    make("llama", tmp_path / "half", torch.float16)
    before = await run.logits(text(9))
    with pytest.raises(UsageError, match=r"another model \(intermediate_size differ\)"):
        run.update_params(tmp_path / "wide")
    with pytest.raises(UsageError, match="in another form"):
        run.update_params(tmp_path / "half")
    assert np.array_equal(await run.logits(text(9)), before)
    (tmp_path / "half" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        run.update_params(tmp_path / "half")
    assert np.array_equal(await run.logits(text(9)), before)


def test_half_precision_keeps_its_cache_in_its_own_dtype(tmp_path: Path) -> None:
    model = make("gpt2", tmp_path, torch.bfloat16)
    ids = text(40)
    with engine(tmp_path) as run:
        assert run.info.kv_cache == "bfloat16"
        rounded = asyncio.run(run.logits(ids)) - logits_of(model, ids)
    with engine(tmp_path, cache_dtype="float32") as run:
        np.testing.assert_allclose(asyncio.run(run.logits(ids)), logits_of(model, ids), atol=1e-3)
    assert 1e-3 < np.abs(rounded).max() < 0.5


REFUSED = [
    ({"quant_policy": 8}, "--quant-policy"),
    ({"kv_rotation": True}, "--kv-rotation"),
    ({"kv_16bit_layers": (0,)}, "--kv-16bit-layers"),
    ({"cpu_activations": "int8"}, "--cpu-activations"),
    ({"deterministic": True}, "--deterministic"),
    ({"device": "cuda:99"}, "cuda:99"),
    ({"session_len": 10**6}, "session_len"),
    ({"cache_max_entry_count": 1}, "a larger --cache-max-entry-count$"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_it_does_not_do_is_refused_by_name(model: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named), engine(model, **config):
        pass


async def test_requests_that_can_never_run_are_refused(model: Path) -> None:
    with engine(model, session_len=64, cache_max_entry_count=4) as run:
        with pytest.raises(PromptError, match="64"):
            run.generate(text(64))
        with pytest.raises(PromptError, match="allowed_token_ids"):
            run.generate(text(5), GenerationConfig(allowed_token_ids=(257,)))
        assert len(await generate(run, text(40), 24)) == 24


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            UnsupportedModelError,
            "GPT2LMHeadModel with weights in format awq",
        ),
        (
            {
                "model_type": "newest",
                "architectures": ["NewestForCausalLM"],
                "auto_map": {"AutoConfig": "x.Y"},
            },
            UnsupportedModelError,
            "no code for NewestForCausalLM, and a checkpoint's own code is never run",
        ),
        (
            {"architectures": ["GPT2ForTokenClassification"]},
            UnsupportedModelError,
            "no causal language model",
        ),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, UnsupportedModelError, "no causal language"),
        ({"n_layer": 3}, CheckpointError, r"no tensor transformer\.h\.2\."),
        ({"n_layer": "three"}, CheckpointError, "config.json is not a valid gpt2 config|transformers cannot"),
    ],
    ids=["quantized", "remote code", "another head", "no text", "missing tensors", "malformed"],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, fields: dict[str, Any], error: type[TurbomillError], says: str
) -> None:
    make("gpt2", tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(error, match=says) as raised, engine(tmp_path):
        pass
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
