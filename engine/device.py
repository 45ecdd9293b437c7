"""Where the native engine computes: what `device` means on this machine, and the free memory there."""

from __future__ import annotations

from typing import Any

from turbomill.engine.cache_size import free_memory
from turbomill.errors import UsageError


def resolve_device(device: str, core: Any) -> tuple[str, str]:
    """("cpu" or "cuda:N", why) for EngineConfig's `device`. Raises UsageError when there is no such GPU."""
    if device == "cpu":
        return "cpu", "asked for"
    built = "cuda" in core.build_info()["backends"]
    gpus = core.cuda_devices() if built else []
    if device == "auto":
        if gpus:
            return "cuda:0", f"found {gpus[0]['name']}"
        return "cpu", "no GPU was found" if built else "this build has no cuda backend"
    if not built:
        raise UsageError(
            f"device is {device!r}, but this build has no cuda backend: rebuild where nvcc and cuBLAS "
            "are, or use --device cpu"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpus):
        raise UsageError(f"device is {device!r}, but {len(gpus)} GPUs were found: use --device cpu or auto")
    return f"cuda:{index}", "asked for"


def free_device_memory(device: str, core: Any) -> int:
    """Bytes that may still be allocated on a resolved device."""
    if device == "cpu":
        return free_memory()
    return core.cuda_devices()[int(device.partition(":")[2])]["free_bytes"]


def activation_bits(wanted: str, device: str, core: Any) -> int:
    """Bits of what `device` multiplies quantized weights with, 32 for floating point, as `cpu_activations` is
    `wanted`. Raises UsageError where a CPU cannot."""
    if device != "cpu" or wanted == "float32":
        return 32
    able = core.cpu_features()["int8"]
    if wanted != "auto" and not able:
        raise UsageError(f"cpu_activations is {wanted!r}, which needs AVX-512 VNNI; use 'float32'")
    return {"int16": 16, "int8": 8}.get(wanted, 16 if able else 32)
