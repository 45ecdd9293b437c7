"""What a run will take, said before it begins: from the model's shapes and two measured speeds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod

import torch

from turbomill.calib_data import Windows
from turbomill.convert.checkpoint import Checkpoint
from turbomill.quant.options import QuantOptions
from turbomill.quant.parallel import row_parts, workers
from turbomill.quant.recipe import Recipe

BASE = 500e6  # Python, torch and transformers
STEPS = 20  # candidates of a range or scale search
PROBE = 1024  # side of the matrices that are multiplied to measure
COLUMNS = 256  # to measure what one operation takes
SOLVE_OPS, REFINE_OPS = 10, 14  # operations on one column of a weight, in GPTQ's loop and in a refining pass


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. On a CPU, runs took up to three times as long."""

    seconds: float
    memory: float
    disk: float

    def __str__(self) -> str:
        time_text = f"{self.seconds / 60:.0f} min" if self.seconds > 90 else f"{self.seconds:.0f} s"
        return (
            f"about {time_text}, {self.memory / 1e9:.1f} GB of memory, {self.disk / 1e9:.2f} GB written "
            "(an estimate; the first layers tell more)"
        )


def activation_bytes(checkpoint: Checkpoint, windows: Windows, streams: int) -> int:
    """What the hidden states of all calibration tokens take, with what the attention is remembered by."""
    arch, config = checkpoint.arch, checkpoint.config
    attended, _ = arch.linear_shapes(config)[arch.attention_output]
    return 4 * windows.ids.numel() * (int(config["hidden_size"]) + attended) * streams


def estimate(
    checkpoint: Checkpoint,
    windows: Windows | None,
    recipe: Recipe,
    options: QuantOptions,
    device: torch.device,
) -> Estimate:
    """For the whole model, whose layers are all taken to be like the last."""
    arch, config = checkpoint.arch, checkpoint.config
    shapes = arch.linear_shapes(config)
    names = arch.linears_of(config, arch.num_layers(config) - 1)
    layer = sum(prod(shapes[name]) for name in names)
    scheme = options.scheme
    total = sum(prod(shapes[n]) for i in range(arch.num_layers(config)) for n in arch.linears_of(config, i))
    others = sum(prod(shape) for shape in arch.other_weights(config).values()) * checkpoint.dtype.itemsize
    disk = total * scheme.bits_per_weight / 8 + others
    flops_rate, touch_rate, op_seconds = _speeds(device)
    pack_rate = touch_rate if device.type == "cpu" else _speeds(torch.device("cpu"))[1]
    largest = max(prod(shapes[name]) for name in names)
    # The layer mapped and in fp32, its codes in fp32, and what rounding the largest linear takes.
    memory = BASE + (checkpoint.dtype.itemsize + 8) * layer + 16 * largest
    touched = layer * 4.0  # rounding
    packed = layer * 8.0  # from codes to the checkpoint's bytes, on the CPU
    flops = operations = 0.0
    if windows is not None:
        streams, tokens = 1 + recipe.correct, windows.ids.numel()
        inputs = {shapes[name][0] for name in names}
        stacked = _stacked(arch.fusions_of(config, arch.num_layers(config) - 1), shapes)
        active = layer * _active_share(checkpoint, names)
        flops += streams * 2 * tokens * active * 2.2  # the attention's stages run anew up to each linear
        flops += sum(2 * tokens * k * k * streams for k, _n in stacked)
        if recipe.solve:
            flops += sum((2 + 2 * recipe.refine) * n * k * k + 2 * k**3 for k, n in stacked)
            parts = [k * -(-len(row_parts(n, device)) // workers(device)) for k, n in stacked]
            operations = sum(parts) * (SOLVE_OPS + REFINE_OPS * recipe.refine)
        if recipe.scale:
            flops += sum(2 * n * k * k * (STEPS + 2) for k, n in stacked)
        touched += layer * STEPS * 12.0
        kept = 0 if options.spool else activation_bytes(checkpoint, windows, streams)
        batch = options.batch_of(windows.length) * windows.length
        width = max(n for _k, n in stacked) + 3 * int(config["hidden_size"])
        memory += kept + 4 * layer * (streams - 1) + 16 * max(inputs) ** 2 + 4 * batch * width * 2
    a_layer = flops / flops_rate + touched / touch_rate + packed / pack_rate + operations * op_seconds
    return Estimate(arch.num_layers(config) * a_layer + total * 2 / pack_rate, memory, disk)


def _stacked(fusions, shapes: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """(K, N) of each stage; experts as their linears one by one would be, on a share of the tokens."""
    return [
        (shapes[fusion.names()[0]][0], sum(shapes[name][1] for name in fusion.names())) for fusion in fusions
    ]


def _active_share(checkpoint: Checkpoint, names: tuple[str, ...]) -> float:
    """The share of a layer's weights that a token meets."""
    experts = checkpoint.arch.num_experts(checkpoint.config)
    if not experts:
        return 1.0
    chosen = int(checkpoint.arch.model_config(checkpoint.config)["experts_per_token"])
    return min(1.0, chosen / experts + 0.1)


def _speeds(device: torch.device) -> tuple[float, float, float]:
    """Measured in a moment: floating-point operations a second, elements that a simple pass touches, and the
    seconds of an operation on one column."""
    a = torch.rand(PROBE, PROBE, device=device)
    best_product = best_pass = best_column = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best_product = min(best_product, time.perf_counter() - start)
        start = time.perf_counter()
        float(a.div(1.5).round_().clamp_(0, 15)[0, 0])
        best_pass = min(best_pass, time.perf_counter() - start)
        start = time.perf_counter()
        for column in a[:COLUMNS]:
            column.add_(1)
        float(a[0, 0])
        best_column = min(best_column, time.perf_counter() - start)
    return 2 * PROBE**3 / best_product, 3 * PROBE**2 / best_pass, best_column / COLUMNS
