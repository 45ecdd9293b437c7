"""Draws tokens from logits, rule for rule as csrc/kernels/sampling.cc: the same seed gives the same text.

Greedy (ties: lowest id), or temperature, then min-p, then top-k, then top-p, then a draw by an exponential
race: token i wins when Exp_i / p_i is smallest. Exp_i depends on (seed, position, i) alone, so the batch, and
a logit's last bit, decide nothing unless two tokens nearly tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turbomill.engine.pytorch.records import Request, TokenLogprobs

WORD = (1 << 64) - 1
LARGEST = 1.0 - 2.0**-53


def _signed(value: int) -> int:
    """Of 64 bits, as torch's int64 holds them."""
    value &= WORD
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele et al., 2014), of int64 whose products wrap."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _uniform(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """fp64 [R, V] in (0, 1): the draws of each row's (seed, position)."""
    seed = torch.tensor([_signed(seed) for seed in seeds], device=device)
    position = torch.tensor([_signed(p + 0x632BE59BD9B4E019) for p in positions], device=device)
    stream = _mix(_mix(seed) ^ _mix(position))  # [R]
    tokens = torch.arange(vocab_size, device=device)
    return (_shifted(_mix(stream[:, None] + tokens), 11) + 1).double() * 2.0**-53


def _passing(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """bool [R, V]: the tokens that min-p, then top-k, then top-p leave."""
    vocab = logits.shape[1]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    temperature = column([r.temperature for r in requests]).double()
    gaps = [
        np.float64(np.float32(r.temperature)) * np.log(np.float64(np.float32(r.min_p)))
        if r.min_p
        else -np.inf
        for r in requests
    ]
    # Likeliest first, of equal ones the lowest id: a stable sort keeps their order.
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    best = ordered[:, :1]
    kept = ordered >= best + column([float(gap) for gap in gaps])
    ranks = torch.arange(vocab, device=logits.device)
    kept &= ranks < column([r.top_k or vocab for r in requests], torch.int64)
    # The smallest set of the likeliest whose probability reaches top_p: one token at least.
    weights = torch.where(kept, ((ordered - best).double() / temperature).exp(), 0.0)
    before = weights.cumsum(1) - weights
    top_p = column([r.top_p for r in requests]).double()
    kept &= (before < top_p * weights.sum(1, keepdim=True)) | (top_p >= 1) | (ranks == 0)
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def draw(logits: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
    """A token for each row of `logits` [R, V], fp32 and finite; the row's request says how."""
    tokens = logits.argmax(1)
    rows = [i for i, r in enumerate(requests) if r.temperature > 0 and r.top_k != 1]
    if rows:
        chosen = [requests[i] for i in rows]
        some = logits[rows]
        device = logits.device
        uniform = _uniform([r.seed for r in chosen], [positions[i] for i in rows], logits.shape[1], device)
        temperature = torch.tensor([[r.temperature] for r in chosen], dtype=torch.float32, device=device)
        keys = some.double() * (1.0 / temperature.double())
        keys -= torch.log(-torch.log1p(-uniform.clamp(max=LARGEST)))
        cut = [i for i, r in enumerate(chosen) if r.top_k or r.top_p < 1 or r.min_p]
        if cut:
            passing = _passing(some[cut], [chosen[i] for i in cut])
            keys[cut] = keys[cut].masked_fill(~passing, -torch.inf)
        tokens[rows] = keys.argmax(1)
    return tokens.tolist()


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of a token in each row of `logits` [R, V], and of the `count` likeliest (ties: lowest id first)."""
    best = logits.amax(1, keepdim=True)
    log_sum = best.double() + (logits - best).double().exp().sum(1, keepdim=True).log()  # [R, 1]
    own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    left, found = logits.clone(), []
    for _ in range(min(count, logits.shape[1])):
        found.append(left.argmax(1, keepdim=True))
        left.scatter_(1, found[-1], -torch.inf)
    ids = torch.cat(found, 1) if found else torch.zeros((len(tokens), 0), dtype=torch.int64)
    ids = ids.to(logits.device)
    values = (logits.gather(1, ids).double() - log_sum).float().tolist()
    return [
        TokenLogprobs(float(logprob), list(zip(row_ids, row, strict=True)))
        for (logprob,), row_ids, row in zip(
            (own.double() - log_sum).float().tolist(), ids.tolist(), values, strict=True
        )
    ]
