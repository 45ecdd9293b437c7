"""What rounding K, or V, costs each layer: measured on the attention's output, with the model's own K and V.

Large channels of K are recognised here, from the values and not from the model's name: one scale per token
and head must span them, and what the small channels say is rounded away (KIVI, arXiv 2402.02750; Qwen2.5's K
is known for it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from turbomill import console
from turbomill.convert.reference import attention_implementation
from turbomill.convert.runnable import runnable
from turbomill.convert.store import Store
from turbomill.convert.store.back import StoreCheckpoint
from turbomill.convert.wrapped import WrappedCheckpoint
from turbomill.quant.decoder import StreamedDecoder
from turbomill.reports.runs import LayerKv

KINDS = ("8", "4", "4r")
NAME = "turbomill_kv_statistics"  # of the attention registered with transformers


def rounded(x: Tensor, bits: int) -> Tensor:
    """x [..., D] as the cache gives it back: codes between each row's extremes, with fp16 scale and zero."""
    zero = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - zero) / (2**bits - 1)
    zero, scale = zero.half().float(), scale.half().float()
    codes = ((x - zero) / scale.clamp_min(1e-20)).round_().clamp_(0, 2**bits - 1)
    return codes * scale + zero


def rotated(x: Tensor) -> Tensor:
    """x [..., D] by the cache's rotation, its own inverse: Walsh-Hadamard in blocks of a power of two."""
    d = x.shape[-1]
    block = d & -d
    y = x.reshape(*x.shape[:-1], d // block, block)
    width = 1
    while width < block:
        pairs = y.reshape(*y.shape[:-1], block // (2 * width), 2, width)
        a, b = pairs.unbind(-2)
        y = torch.stack([a + b, a - b], -2).reshape(y.shape)
        width *= 2
    return (y / block**0.5).reshape(x.shape)


def stored(x: Tensor, kind: str, centred: bool = False) -> Tensor:
    """x [B, N, T, D] as a cache of this kind gives it back; `centred`: less its mean while it is stored."""
    if kind != "4r":
        return rounded(x, int(kind))
    mean = x.mean(-2, keepdim=True) if centred else torch.zeros_like(x[..., :1, :])
    return rotated(rounded(rotated(x - mean), 4)) + mean


@dataclass
class KvStats:
    """One layer's sums over all windows."""

    absmax: Tensor | None = None  # [Nkv, D] of K, as cached: behind RoPE
    energy: float = 0.0
    errors: dict[tuple[str, str], float] = field(default_factory=dict)

    def row(self, layer: int) -> LayerKv:
        """For the report. Errors are relative to the output's energy."""
        assert self.absmax is not None
        medians = self.absmax.median(-1).values.clamp_min(1e-20)  # [Nkv]
        errors = {key: value / max(self.energy, 1e-30) for key, value in self.errors.items()}
        return LayerKv(
            layer=layer,
            k_absmax=float(self.absmax.max()),
            k_outlier=float((self.absmax.amax(-1) / medians).max()),
            k_error={kind: errors["k", kind] for kind in KINDS},
            v_error={kind: errors["v", kind] for kind in KINDS},
        )


_active: list[tuple[KvStats, str]] = []


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """transformers' own attention of [B, N, T, D], three times: as it is, with K and with V rounded."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stats, base = _active[-1]
    eager = sys.modules[type(module).__module__]
    own: Any = ALL_ATTENTION_FUNCTIONS[base] if base != "eager" else vars(eager)["eager_attention_forward"]
    exact = own(module, query, key, value, mask, **kwargs)
    stats.energy += float(exact[0].square().sum(dtype=torch.float64))
    centred = not kwargs.get("softcap")  # what a constant in all scores does to a softcap is not nothing
    for kind in KINDS:
        for side, k, v in (("k", stored(key, kind, centred), value), ("v", key, stored(value, kind))):
            other = own(module, query, k, v, mask, **kwargs)[0]
            error = float((other - exact[0]).square().sum(dtype=torch.float64))
            stats.errors[side, kind] = stats.errors.get((side, kind), 0.0) + error
    absmax = key.abs().amax(dim=(0, 2)).cpu()  # [Nkv, D]
    stats.absmax = absmax if stats.absmax is None else torch.maximum(stats.absmax, absmax)
    return exact


@contextmanager
def _watching(layer: nn.Module, stats: KvStats, base: str) -> Iterator[None]:
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    for module in layer.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME  # the layer's own copy of the config
    _active.append((stats, base))
    try:
        yield
    finally:
        _active.pop()


class _Dequantized(WrappedCheckpoint):
    """A store as a checkpoint whose every linear has a weight: what its codes stand for."""

    def names(self) -> list[str]:
        """The source's, and the quantized linears' weights."""
        linears = (f"{prefix}.weight" for prefix in self.arch.linear_prefixes(self.config))
        return [*self.source.names(), *(name for name in linears if not self.source.has(name))]

    def has(self, name: str) -> bool:
        """Whether `tensor` gives it."""
        return self.source.has(name) or name.removesuffix(".weight") in self.arch.linear_prefixes(self.config)

    def tensor(self, name: str) -> Tensor:
        """The source's, or a linear's weight [N, K]."""
        if self.source.has(name):
            return self.source.tensor(name)
        return self.source.linear(name.removesuffix(".weight")).dequantize()


@torch.no_grad()
def measure_kv(store: Store, ids: Tensor) -> list[LayerKv]:
    """Every layer's sensitivity on windows of ids int64 [n, T], one layer in memory at a time, in fp32."""
    checkpoint = runnable(_Dequantized(StoreCheckpoint(store)))
    decoder = StreamedDecoder(checkpoint)
    base = attention_implementation(checkpoint.hf_config())
    hidden = decoder.embed(ids.split(1))
    rows = []
    with console.progress("K and V of each layer", decoder.num_layers) as task:
        for index in range(decoder.num_layers):
            layer, stats = decoder.load(index), KvStats()
            with _watching(layer, stats, base):
                hidden = [decoder.run(layer, index, batch) for batch in hidden]
            rows.append(stats.row(index))
            task.advance()
    return rows
