"""A model on disk, run one decoder layer at a time in fp32 with transformers' modelling code.

Only the layer in work is in memory; what flows between layers is the list of hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from turbomill.convert.checkpoint import Checkpoint
from turbomill.convert.reference import attention_implementation
from turbomill.quant.experts import unstack


class _Recorder(nn.Module):
    """Stands in for a decoder layer: keeps what the model passes to it, and hands the hidden states on."""

    def __init__(self, seen: list[tuple[Tensor, dict[str, Any]]]) -> None:
        super().__init__()
        self._seen = seen

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self._seen.append((hidden_states, kwargs))
        return hidden_states


class _Instead(nn.Module):
    """Stands in for the decoder layers: gives what they would give."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = [output]  # in a list: no part of the module's state

    def forward(self, _hidden_states: Tensor, **_kwargs: Any) -> Tensor:
        return self._output[0]


class StreamedDecoder:
    """The decoder layers of a checkpoint, loaded on request as fp32 modules."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        self._checkpoint = checkpoint
        self.device = torch.device(device)
        self.arch = checkpoint.arch
        self.num_layers = self.arch.num_layers(checkpoint.config)
        # Parameters stay empty; buffers such as RoPE's frequencies are computed, they are not in the
        # checkpoint.
        config = checkpoint.hf_config()
        with init_empty_weights(include_buffers=False):
            self._skeleton = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention_implementation(config)
            ).eval()
        for module in self._skeleton.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        # Per batch shape and layer: what the model passes beside the hidden states (mask, positions, RoPE).
        self._kwargs: dict[tuple[int, int], list[dict[str, Any]]] = {}

    @torch.no_grad()
    def embed(self, batches: Iterable[Tensor]) -> list[Tensor]:
        """What the first layer reads for each batch of ids int64 [B, T]: fp32 [B, T, H]."""
        base = self._skeleton.get_decoder()
        kept = (base.layers, base.norm)
        seen: list[tuple[Tensor, dict[str, Any]]] = []
        base.layers = nn.ModuleList(_Recorder(seen) for _ in range(self.num_layers))
        base.norm = nn.Identity()
        embedding = self._skeleton.get_input_embeddings()
        empty = embedding.weight
        embedding.weight = nn.Parameter(
            self._checkpoint.tensor(self.arch.embedding).to(self.device, torch.float32), requires_grad=False
        )
        hidden = []
        try:
            for ids in batches:
                seen.clear()
                base(input_ids=ids.to(self.device), use_cache=False)
                hidden.append(seen[0][0])
                self._kwargs.setdefault((ids.shape[0], ids.shape[1]), [kwargs for _, kwargs in seen])
        finally:
            base.layers, base.norm = kept
            embedding.weight = empty
        return hidden

    def score_gradient(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """The gradient of log p(y) by the last layer's output `hidden` fp32 [B, T, H], y drawn from p at each
        position. On the CPU."""
        model, base = self._skeleton, self._skeleton.get_decoder()
        head = model.get_output_embeddings()
        kept = (base.layers, base.norm.weight, head.weight)
        arch, config = self.arch, self._checkpoint.config
        weight = self._checkpoint.tensor(arch.embedding if arch.tied(config) else arch.head)
        weight = weight.to(self.device, torch.float32)
        try:
            base.norm.weight = nn.Parameter(
                self._checkpoint.tensor(arch.final_norm).to(self.device, torch.float32), requires_grad=False
            )
            head.weight = nn.Parameter(
                weight if arch.head_transform is None else arch.head_transform(weight), requires_grad=False
            )
            return torch.cat([self._score(row, generator) for row in hidden.split(1)])
        finally:
            base.layers, base.norm.weight, head.weight = kept

    def _score(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        with torch.enable_grad():
            at = hidden.detach().to(self.device).requires_grad_()
            # The model's own way from the last layer to the logits, with this in the layers' place.
            self._skeleton.get_decoder().layers = nn.ModuleList([_Instead(at)])
            log_p = self._skeleton(inputs_embeds=torch.zeros_like(at), use_cache=False).logits.float()
            log_p = log_p.log_softmax(-1)[0]  # [T, V]
            drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator)
            (gradient,) = torch.autograd.grad(log_p.gather(-1, drawn.to(at.device)).sum(), at)
        return gradient.cpu()

    def load(self, index: int, source: Checkpoint | None = None) -> nn.Module:
        """A new copy of layer `index` with its weights in fp32, from the model or from its like, `source`.

        Quantized linears of `source` have the weights that their codes stand for. Experts are linears of
        their own, as in the checkpoint, where transformers stacks them.
        """
        layer = copy.deepcopy(self._skeleton.get_decoder().layers[index])
        unstack(layer)
        prefix, source = self.arch.layer(index), source or self._checkpoint
        weights = {}
        for name in layer.state_dict():
            linear, _, kind = (prefix + name).rpartition(".")
            packed = kind == "weight" and not source.has(prefix + name)
            tensor = source.linear(linear).dequantize() if packed else source.tensor(prefix + name)
            # A copy also of fp32: it is mapped from its file, and layers are changed in place.
            weights[name] = tensor.to(self.device, torch.float32, copy=True)
        layer.load_state_dict(weights, assign=True)
        return layer.requires_grad_(False).eval()

    @torch.no_grad()
    def run(self, layer: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Layer `index`'s output for fp32 [B, T, H]."""
        return self.outputs(layer, index, hidden)

    def outputs(self, layer: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """As `run`, with gradients where they are on."""
        kwargs = self._kwargs[(hidden.shape[0], hidden.shape[1])][index]
        output = layer(hidden, **kwargs)
        return output[0] if isinstance(output, tuple) else output


@contextmanager
def watching(layer: nn.Module, hooks: dict[str, Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
    """While open, each named module of `layer` reports its (input, output)."""
    handles = [
        layer.get_submodule(name).register_forward_hook(
            lambda _module, args, output, hook=hook: hook(args[0], output)
        )
        for name, hook in hooks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
