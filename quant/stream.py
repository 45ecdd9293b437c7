"""Calibration activations on their way through the layers of one model, layer after layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from turbomill.quant.decoder import StreamedDecoder
from turbomill.quant.parallel import spread, workers


class _Reached(Exception):  # noqa: N818  (control flow, not an error)
    """The module of interest has its input: the rest of the forward pass is not needed."""

    def __init__(self, args: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.args_of_call = args


class _Remembered(nn.Module):
    """Stands in for an attention whose inputs and projections no longer change: only its last linear is
    left."""

    def __init__(self, last: nn.Module, batch: threading.local) -> None:
        super().__init__()
        self._last = last
        self._batch = batch  # `.inputs`: what `last` reads of the batch that this thread runs

    def forward(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, None]:
        return self._last(self._batch.inputs), None


class Stream:
    """The hidden states [B, T, H] of each batch before one layer, and what that layer does with them.

    `enter` a layer, look at the inputs of its linears in the order of the forward pass, and `leave` it. The
    attention is computed once: its last linear's inputs are remembered, and what follows starts from there.
    """

    def __init__(self, decoder: StreamedDecoder, hidden: list[Tensor]) -> None:
        self._decoder = decoder
        self.hidden = hidden
        self._layer: nn.Module | None = None
        self._index = 0
        self._attended: list[Tensor] = []  # per batch: what the attention's last linear reads

    def enter(self, layer: nn.Module, index: int) -> None:
        """Begin with `layer`, the model's layer `index`, which the caller may change on the way."""
        self._layer, self._index = layer, index
        self.forget()

    def forget(self) -> None:
        """What the attention gives has changed: compute it again."""
        self._attended = []

    def inputs(self, name: str) -> Iterator[Tensor]:
        """The inputs [B, T, K] of the layer's module `name`, batch by batch."""
        return (args[0] for args in self.calls(name))

    def calls(self, name: str) -> Iterator[tuple[Tensor, ...]]:
        """All that the layer's module `name` is called with, batch by batch."""
        layer = self._entered()
        keep = name == self._decoder.arch.attention_output
        if keep:
            self.forget()

        def reached(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _Reached(args)

        step = workers(self._decoder.device)  # inputs held at a time
        for start in range(0, len(self.hidden), step):
            # The hook is there only while batches run: the caller works on the layer in between.
            handle = layer.get_submodule(name).register_forward_pre_hook(reached)
            try:
                batch = self._run(range(start, min(start + step, len(self.hidden))), name)
            finally:
                handle.remove()
            if keep:
                self._attended += [args[0] for args in batch]
            yield from batch

    def submodule(self, name: str) -> Any:
        """A module of the layer."""
        return self._entered().get_submodule(name)

    def leave(self) -> None:
        """Replace each batch by the layer's output for it."""
        self._entered()
        step = workers(self._decoder.device)
        for start in range(0, len(self.hidden), step):
            batch = range(start, min(start + step, len(self.hidden)))
            self.hidden[start : start + step] = [output for (output,) in self._run(batch, None)]
        self._layer = None
        self.forget()

    def _run(self, batches: range, stop: str | None) -> list[tuple[Tensor, ...]]:
        """Run some batches through the layer, to its end (its output) or to the call of module `stop`."""
        layer, local = self._entered(), threading.local()
        known = len(self._attended) == len(self.hidden)

        def run(at: int) -> tuple[Tensor, ...]:
            if known:
                local.inputs = self._attended[at]
            try:
                return (self._decoder.run(layer, self._index, self.hidden[at]),)
            except _Reached as reached:
                return reached.args_of_call

        with self._short_cut(layer, local) if known else nullcontext():
            return spread(run, batches, self._decoder.device)

    @contextmanager
    def _short_cut(self, layer: nn.Module, local: threading.local) -> Iterator[None]:
        parent, _, last = self._decoder.arch.attention_output.rpartition(".")
        attention = layer.get_submodule(parent)
        setattr(layer, parent, _Remembered(getattr(attention, last), local))
        try:
            yield
        finally:
            setattr(layer, parent, attention)

    def _entered(self) -> nn.Module:
        if self._layer is None:
            raise RuntimeError("enter a layer first")
        return self._layer
