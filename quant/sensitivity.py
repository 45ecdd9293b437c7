"""What rounding one stage of one layer costs the model's predictions, before anything is quantized.

To second order the KL of a window's predictions is E[(sum over tokens of g . e)^2] / 2: e is the change of a
linear's output, g the gradient of log p(y) by that output, and y is drawn from p itself (the Fisher
information; Martens, arXiv 1412.1193). One pass forward and one backward, layer by layer, gives g for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from turbomill import console
from turbomill.convert.linear import QuantScheme
from turbomill.quant.decoder import StreamedDecoder, watching
from turbomill.quant.grid import GridSpec, searched_grid


def sensitivities(
    decoder: StreamedDecoder,
    batches: Sequence[Tensor],
    units: Callable[[int], Sequence[tuple[str, ...]]],
    schemes: Sequence[QuantScheme],
    spec_of: Callable[[QuantScheme], GridSpec],
    seed: int = 0,
) -> list[list[dict[QuantScheme, float]]]:
    """For each layer and unit, the KL in nats per token that each scheme's rounding adds. ids int64 [B, T].

    `units` names the linears of a layer that get one scheme, for each such choice. Rounding is to nearest on
    searched ranges; GPTQ does better than this by much the same factor everywhere.
    Each window is one sample: many short ones say more than a few long ones.
    """
    hidden = [[batch.cpu() for batch in decoder.embed(batches)]]
    with console.progress("measuring sensitivity", 2 * decoder.num_layers) as task:
        for index in range(decoder.num_layers):
            layer = decoder.load(index)
            hidden.append([decoder.run(layer, index, x.to(decoder.device)).cpu() for x in hidden[-1]])
            task.advance()
        generator = torch.Generator().manual_seed(seed)
        gradients = [decoder.score_gradient(x, generator) for x in hidden.pop()]
        found: list[list[dict[QuantScheme, float]]] = []
        for index in reversed(range(decoder.num_layers)):
            layer = decoder.load(index)
            probe = _Probe(layer, units(index), schemes, spec_of)
            inputs = hidden.pop()
            probe.see_inputs(lambda: [decoder.run(layer, index, x.to(decoder.device)) for x in inputs])  # noqa: B023
            for i, x in enumerate(inputs):
                gradients[i] = probe.backward(
                    lambda at: decoder.outputs(layer, index, at),  # noqa: B023
                    x.to(decoder.device),
                    gradients[i],
                )
            found.append(probe.losses())
            task.advance()
    return found[::-1]


class _Probe:
    """One layer: its linears' rounding errors, and how much they matter."""

    def __init__(
        self,
        layer: nn.Module,
        units: Sequence[tuple[str, ...]],
        schemes: Sequence[QuantScheme],
        spec_of: Callable[[QuantScheme], GridSpec],
    ) -> None:
        self._layer = layer
        self._units, self._schemes, self._spec_of = units, schemes, spec_of
        self._modules = {name: layer.get_submodule(name) for unit in units for name in unit}
        self._errors: dict[str, list[Tensor]] = {}  # per scheme: Q - W [N, K]
        self._tokens = 0
        self._sums = [[0.0] * len(schemes) for _ in units]

    def see_inputs(self, forward: Callable[[], object]) -> None:
        """Choose ranges by E[x^2], and keep each scheme's error."""
        squares = {name: torch.zeros(()) for name in self._modules}

        def see(name: str, x: Tensor) -> None:
            total = x.float().square().reshape(-1, x.shape[-1]).sum(0)
            squares[name] = squares[name].to(total.device) + total

        with watching(self._layer, {name: lambda x, _y, name=name: see(name, x) for name in squares}):
            forward()
        for name, module in self._modules.items():
            weight: Tensor = module.weight.data  # type: ignore[assignment]
            importance = squares[name].expand(weight.shape[1])
            self._errors[name] = [
                searched_grid(weight, importance, self._spec_of(scheme)).round(weight).sub_(weight)
                for scheme in self._schemes
            ]

    def backward(self, forward: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Tensor:
        """Take the gradient by the layer's output back to its input [B, T, H], looking at each linear's."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def see(name: str, inputs: Tensor, output: Tensor) -> None:
            output.register_hook(lambda grad: seen.__setitem__(name, (inputs.detach(), grad.detach())))

        hooks = {name: lambda i, o, name=name: see(name, i, o) for name in self._modules}
        with watching(self._layer, hooks), torch.enable_grad():
            at = x.detach().requires_grad_()
            output = forward(at)
            (back,) = torch.autograd.grad(output, at, gradient.to(output.device))
        self._tokens += x.shape[0] * x.shape[1]
        for sums, unit in zip(self._sums, self._units, strict=True):
            called = [(*seen[name], name) for name in unit if name in seen]
            for i in range(len(self._schemes)):
                changes: dict[int, Tensor] = {}  # of log p: per window [B], or per token of a routed expert
                for number, (inputs, grad, name) in enumerate(called):
                    change = (inputs @ self._errors[name][i].T).mul_(grad).sum(-1)
                    if change.dim() == 2:
                        changes[-1] = change.sum(-1) + changes.get(-1, 0)
                    else:
                        changes[number] = change
                sums[i] += sum(float(change.square().sum()) for change in changes.values()) / 2
        return back.cpu()

    def losses(self) -> list[dict[QuantScheme, float]]:
        """Per stage: scheme -> nats per token."""
        tokens = max(self._tokens, 1)
        return [
            {scheme: total / tokens for scheme, total in zip(self._schemes, sums, strict=True)}
            for sums in self._sums
        ]
