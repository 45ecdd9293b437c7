"""Which device "auto", "cpu" and "cuda:N" mean, with cores that have and lack GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from turbomill.engine.config import EngineConfig
from turbomill.engine.device import activation_bits, free_device_memory, resolve_device
from turbomill.errors import UsageError


def core(backends: list[str], free: list[int]) -> Any:
    gpus = [{"name": f"GPU {i}", "free_bytes": nbytes} for i, nbytes in enumerate(free)]
    return SimpleNamespace(build_info=lambda: {"backends": backends}, cuda_devices=lambda: gpus)


CPU_ONLY, NO_GPU = core(["cpu"], []), core(["cpu", "cuda"], [])
TWO = core(["cpu", "cuda"], [10 << 30, 20 << 30])


def test_auto_takes_a_gpu_when_there_is_one() -> None:
    assert resolve_device("auto", TWO) == ("cuda:0", "found GPU 0")
    assert resolve_device("auto", NO_GPU) == ("cpu", "no GPU was found")
    assert resolve_device("auto", CPU_ONLY) == ("cpu", "this build has no cuda backend")


def test_what_is_asked_for_is_taken_or_refused() -> None:
    assert resolve_device("cpu", TWO)[0] == "cpu"
    assert resolve_device("cuda", TWO)[0] == "cuda:0"
    assert resolve_device("cuda:1", TWO)[0] == "cuda:1"
    with pytest.raises(UsageError, match="2 GPUs were found"):
        resolve_device("cuda:2", TWO)
    with pytest.raises(UsageError, match="0 GPUs were found"):
        resolve_device("cuda", NO_GPU)
    with pytest.raises(UsageError, match="no cuda backend"):
        resolve_device("cuda", CPU_ONLY)


def test_free_memory_is_the_devices_own() -> None:
    assert free_device_memory("cuda:1", TWO) == 20 << 30
    assert free_device_memory("cpu", TWO) > 0


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "", 0])
def test_unknown_devices_are_usage_errors(device: Any) -> None:
    with pytest.raises(UsageError, match="device"):
        EngineConfig(device=device)


def test_activations_are_what_the_cpu_can_multiply() -> None:
    able, unable = (SimpleNamespace(cpu_features=lambda v=value: {"int8": v}) for value in (True, False))
    found = [activation_bits(wanted, "cpu", able) for wanted in ("auto", "float32", "int16", "int8")]
    assert found == [16, 32, 16, 8]
    assert activation_bits("auto", "cpu", unable) == 32
    assert activation_bits("int8", "cuda:0", unable) == 32
    with pytest.raises(UsageError, match=r"cpu_activations is 'int8', which needs AVX-512 VNNI"):
        activation_bits("int8", "cpu", unable)
    with pytest.raises(UsageError, match=r"cpu_activations is 'int4', expected one of auto, float32"):
        EngineConfig(cpu_activations="int4")
