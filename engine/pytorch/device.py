"""The device that the PyTorch engine computes on: which one, what fits there, and how its failures read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from turbomill.engine.cache_size import free_memory
from turbomill.engine.requests import EngineError
from turbomill.errors import UsageError


def resolve_device(device: str) -> tuple[torch.device, str]:
    """EngineConfig's `device` as PyTorch has it, and why. Raises UsageError when there is no such GPU."""
    if device == "cpu":
        return torch.device("cpu"), "asked for"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        if count:
            return torch.device("cuda:0"), f"found {torch.cuda.get_device_name(0)}"
        return torch.device("cpu"), "PyTorch finds no GPU"
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise UsageError(f"device is {device!r}, but PyTorch finds {count} GPUs: use --device cpu or auto")
    return torch.device(f"cuda:{index}"), "asked for"


def give_memory_back(device: torch.device) -> None:
    """What PyTorch keeps for its next tensors, so that others find it free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated."""
    if device.type == "cpu":
        return free_memory()
    give_memory_back(device)
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def fitting(device: torch.device, nbytes: int, what: str, lower: str) -> Iterator[None]:
    """Around what allocates `nbytes`. Where they do not fit, raises EngineError that says what to `lower`."""
    free = free_bytes(device)
    refusal = f"{what} needs {nbytes} bytes on {device}, where {free} are free: {lower}"
    if nbytes > free:
        raise EngineError(refusal)
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:  # others took it meanwhile
        raise EngineError(refusal) from error


def of_device(error: Exception) -> bool:
    """Whether an error is the device's, or for want of memory, and not of what the model's code does."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | EngineError)


def is_lost(error: Exception) -> bool:
    """Whether nothing more can be computed: after a CUDA error, a process has no device any more."""
    return isinstance(error, torch.AcceleratorError)


def failure(error: Exception) -> str:
    """An error of a step in one line, without PyTorch's advice to its developers."""
    if isinstance(error, torch.OutOfMemoryError):
        tried = str(error).partition(" GPU ")[0]
        return f"{tried} Lower --max-prefill-token-num, --max-batch-size or --cache-max-entry-count"
    if isinstance(error, torch.AcceleratorError):
        return str(error).partition("\n")[0]
    return " ".join(f"{type(error).__name__}: {error}".split())
