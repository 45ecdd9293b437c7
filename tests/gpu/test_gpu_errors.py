"""What does not fit is refused in a sentence; what breaks in a run fails its requests, never their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from apart import run_apart
from architectures import CASES
from native_engine import Native, store_of, tiny_llama
from safetensors.torch import load_file, save_file
from test_native_parity import prompt

from turbomill import _core

# cudaError_t
SUCCESS, INSUFFICIENT_DRIVER, NO_DEVICE = 0, 35, 100


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("errors") / "model"
    tiny_llama(path, head_dim=64, intermediate_size=8192)
    return store_of(path)


def gpu(store: Any, **config: Any) -> Native:
    return Native(store, device="cuda", **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cache_block_count": 10**8}, r"the KV cache needs \d{12,} bytes .* lower cache_max_entry_count"),
        (
            {"max_prefill_token_num": 10**7},
            r"an activation buffer needs \d{12,} bytes .* \d+ of \d+ are free: lower max_prefill_token_num",
        ),
        ({"session_len": 2 * 10**9}, r"the rotary table needs \d{11,} bytes .* lower session_len"),
    ],
)
def test_what_does_not_fit_names_its_bytes_and_what_to_lower(
    config: dict[str, int], message: str, store: Any
) -> None:
    with pytest.raises(RuntimeError, match=message):
        gpu(store, **config)
    with gpu(store) as engine:  # the failed one left nothing behind
        assert len(engine.generate(prompt(5), 3)) == 3


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    CASES["qwen3-moe"].make(tmp_path / "moe", moe_intermediate_size=4096)
    message = r"the workspace of experts needs \d{12,} bytes .* lower max_prefill_token_num"
    with pytest.raises(RuntimeError, match=message):
        gpu(store_of(tmp_path / "moe"), max_prefill_token_num=10**7)


def test_devices_that_do_not_exist(store: Any) -> None:
    with pytest.raises(RuntimeError, match=r"device is 'cuda:99', but this machine has \d+ GPU"):
        Native(store, device="cuda:99")
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:1x"):
        with pytest.raises(ValueError, match=f"device is '{name}', expected cpu, cuda or cuda:N"):
            Native(store, device=name)


def test_the_first_gpu_by_either_name(store: Any) -> None:
    texts = []
    for name in ("cuda", "cuda:0"):
        with Native(store, device=name) as engine:
            texts.append(engine.generate(prompt(30), 10))
    assert texts[0] == texts[1]


def test_refusals_are_sentences() -> None:
    refusal = _core.kernels_cuda.device_refusal
    assert refusal("cuda", SUCCESS, 1, 13000, 13000) == ""
    assert refusal("cuda", INSUFFICIENT_DRIVER, 0, 0, 13000) == (
        "no NVIDIA driver is installed, device 'cuda' cannot be used"
    )
    assert refusal("cuda:1", INSUFFICIENT_DRIVER, 0, 12040, 13000) == (
        "the NVIDIA driver supports CUDA 12.4, this build needs 13.0: update the driver or use device 'cpu'"
    )
    assert refusal("cuda:2", SUCCESS, 2, 13000, 13000).endswith("this machine has 2 GPUs")
    assert refusal("cuda", NO_DEVICE, 7, 13000, 13000).endswith("this machine has 0 GPUs")
    capability = _core.kernels_cuda.capability_refusal
    assert capability(0, 7, 5) == (
        "GPU 0 has compute capability 7.5, for which this build has no kernels: they need 8.0 or more, use "
        "device 'cpu'"
    )
    assert capability(1, 12, 0).endswith("rebuild with it in TURBOMILL_CUDA_ARCHITECTURES")


BROKEN = """
import sys
from pathlib import Path
from native_engine import Native, store_of
from test_native_parity import prompt
from turbomill import _core
from turbomill.convert.store import open_store

store = open_store(Path(sys.argv[1]))
first = Native(store, device="cuda", eager_mode=len(sys.argv) > 2)
second = Native(store, device="cuda")
assert len(first.generate(prompt(9), 5)) == 5
expected = first.generate(prompt(20), 400)
running = [first.submit(prompt(20), 400) for _ in range(3)]
while len(first.outputs.get(running[0], [])) < 5:
    pass
_core.kernels_cuda.break_gpu()
for request in running:
    outputs = first.wait(request)
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == expected[: len(tokens)], "a wrong token"
    if outputs[-1].finish_reason != "error":
        assert len(tokens) == 400
        continue
    assert "CUDA" in outputs[-1].error, outputs[-1].error
    assert len(tokens) < 400
assert any(first.wait(request)[-1].finish_reason == "error" for request in running)
assert not first.engine.metrics().healthy
for engine in (first, second):  # both live in the context that broke
    later = engine.wait(engine.submit(prompt(5), 5))
    assert later[-1].finish_reason == "error" and "CUDA" in later[-1].error
    assert not any(output.token_ids for output in later)
    assert not engine.engine.metrics().healthy
    engine.close()
try:
    Native(store, device="cuda")
except RuntimeError as error:
    assert "CUDA" in str(error)
else:
    raise AssertionError("an engine started on a broken context")
print("as it should be")
"""


@pytest.mark.parametrize("eager", [False, True])
def test_a_broken_context_fails_every_request_and_says_so(eager: bool, store: Any) -> None:
    """An illegal access while steps are in flight; in a process of its own, which it spoils."""
    run_apart(BROKEN, str(store.path), *["eager"] * eager)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe"])
def test_logits_that_are_not_finite_fail_that_request_alone(name: str, tmp_path: Path) -> None:
    """Beside it, the others' text is what it is without; capped logits and experts hide nothing."""
    path = tmp_path / "nan"
    if name == "llama":
        tiny_llama(path)
    else:
        CASES[name].make(path)
    weights = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
    good = prompt(40)
    with gpu(store_of(path)) as engine:
        expected = engine.generate(good, 12)
    assert 7 not in good + expected
    weights["model.embed_tokens.weight"][7] = float("nan")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in path.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    tied = "lm_head.weight" not in weights  # then NaN is a logit of every token
    with gpu(store_of(broken)) as engine:
        requests = [engine.submit(ids, 12) for ids in (good, [5, 7, 6], good)]
        bad = engine.wait(requests[1])[-1]
        assert bad.finish_reason == "error"
        assert "not finite" in bad.error
        for request in (requests[0], requests[2]):
            if tied:
                assert engine.wait(request)[-1].finish_reason == "error"
            else:
                assert engine.tokens(request) == expected
        assert engine.engine.metrics().healthy
