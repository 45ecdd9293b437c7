"""`turbomill plan`: what fits into a GPU's memory, and what so many conversations need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from turbomill.engine.cache_size import CacheSize
from turbomill.engine.config import EngineConfig
from turbomill.engine.kv_scheme import KvScheme
from turbomill.errors import UsageError
from turbomill.reports.kv_policies import PLANNED, POLICIES, policy_of
from turbomill.reports.memory import Shape

DEFAULTS = EngineConfig()
# What the native engine does not keep packed: the row is arithmetic, and a note says so.
DENSE_HERE = {"8": "the store keeps 8-bit weights in 16 bits today"}


@dataclass(frozen=True)
class Demand:
    """What is asked for."""

    memory: int  # free bytes before the weights
    session_len: int
    conversations: int | None = None
    share: str = str(DEFAULTS.cache_max_entry_count)  # the engine's --cache-max-entry-count
    block_len: int = DEFAULTS.cache_block_seq_len

    def __post_init__(self) -> None:
        for option, value in (("--session-len", self.session_len), ("--conversations", self.conversations)):
            if value is not None and value < 1:
                raise UsageError(f"{option} {value}: expected at least 1")
        CacheSize.parse(self.share)

    @property
    def blocks_per_session(self) -> int:
        """Whole blocks of one conversation."""
        return -(-self.session_len // self.block_len)


@dataclass(frozen=True)
class Fit:
    """One scheme of the weights with one of the KV cache."""

    weights: str
    kv: str
    quant_policy: int
    weight_bytes: int
    kv_bytes_per_token: int
    block_bytes: int
    blocks: int  # that the memory left by the weights buys
    tokens: int
    sequences: int  # of session_len tokens, together
    longest_session: int | None  # of that many conversations; None: no number was asked for
    needed_bytes: int | None  # free memory with which that many conversations fit
    fits: bool  # at least one sequence; with a number of conversations, all of them
    note: str


def plan(shape: Shape, demand: Demand) -> list[Fit]:
    """Every weight scheme with every KV scheme, least quantized first."""
    if demand.session_len > shape.context_length:
        raise UsageError(
            f"--session-len {demand.session_len}: the model's context is {shape.context_length} tokens"
        )
    return [
        _fit(shape, demand, weights, nbytes, policy)
        for weights, nbytes in shape.weights.items()
        for policy in PLANNED
    ]


def fit_scheme(shape: Shape, demand: Demand, kv: KvScheme) -> Fit:
    """One KV scheme, with the first scheme of the weights."""
    weights, nbytes = next(iter(shape.weights.items()))
    return _fit(shape, demand, weights, nbytes, policy_of(kv).name, kv.layers_16bit)


def _fit(
    shape: Shape,
    demand: Demand,
    weights: str,
    weight_bytes: int,
    name: str,
    layers_16bit: Sequence[int] = (),
) -> Fit:
    policy = POLICIES[name]
    per_token = shape.kv_bytes_per_token(policy, layers_16bit)
    block_bytes = per_token * demand.block_len
    left = max(demand.memory - weight_bytes, 0)
    size = CacheSize.parse(demand.share)
    if size.blocks is not None:
        blocks = min(size.blocks, left // block_bytes)
    elif size.nbytes is not None:
        blocks = min(size.nbytes, left) // block_bytes
    else:
        blocks = int((size.share or 0.0) * left) // block_bytes
    sequences = blocks // demand.blocks_per_session
    wanted = demand.conversations
    longest = needed = None
    if wanted is not None:
        longest = min(blocks // wanted * demand.block_len, shape.context_length)
        cache = wanted * demand.blocks_per_session * block_bytes
        needed = weight_bytes + int(cache / (size.share or 1.0))
    return Fit(
        weights=weights,
        kv=policy.name,
        quant_policy=policy.quant_policy,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        block_bytes=block_bytes,
        blocks=blocks,
        tokens=blocks * demand.block_len,
        sequences=sequences,
        longest_session=longest,
        needed_bytes=needed,
        fits=sequences >= (wanted or 1),
        note=DENSE_HERE.get(weights, ""),
    )


def choose(fits: Sequence[Fit]) -> Fit | None:
    """What costs the least of all that fits and that the engine runs as planned; None when nothing fits.

    8 bits in the cache cost next to nothing, 4 bits in the weights less than 4 bits in the cache (README's
    table); another model may differ, which `turbomill eval kv` says.
    """
    order = [("16", "16"), ("16", "8"), ("4", "16"), ("4", "8")]
    order += [(weights, kv) for kv in ("k8v4r", "4r") for weights in ("16", "4")]
    by_name = {(fit.weights, fit.kv): fit for fit in fits if not fit.note}
    known = [by_name[key] for key in order if key in by_name]
    others = [fit for fit in fits if not fit.note and fit not in known]
    return next((fit for fit in (*known, *others) if fit.fits), None)


def plan_json(shape: Shape, demand: Demand, fits: Sequence[Fit]) -> dict[str, Any]:
    """What `--json` prints."""
    best = choose(fits)
    return {
        "model": shape.name,
        "architecture": shape.architecture,
        "memory_bytes": demand.memory,
        "session_len": demand.session_len,
        "conversations": demand.conversations,
        "cache_max_entry_count": demand.share,
        "block_len": demand.block_len,
        "rows": [asdict(fit) for fit in fits],
        "recommended": best and {"weights": best.weights, "quant_policy": best.quant_policy},
    }


def _words(fit: Fit) -> str:
    return POLICIES[fit.kv].scheme.describe()


def answer(shape: Shape, demand: Demand, fits: Sequence[Fit]) -> str:
    """The plan in one sentence."""
    best = choose(fits)
    what = f"{demand.conversations or 1:,} conversation{'s' if demand.conversations != 1 else ''}"
    if demand.conversations is None:
        what = "one conversation"
    asked = f"{what} of {demand.session_len:,} tokens of {shape.name}"
    if best is not None:
        return (
            f"{asked}: fits with {best.weights}-bit weights and {_words(best)} in the KV cache, "
            f"which hold {best.sequences:,}."
        )
    able = [fit for fit in fits if not fit.note]
    most = max(able, key=lambda fit: fit.blocks)
    if not most.blocks:
        return f"{asked}: does not fit; the weights alone take {most.weight_bytes / 2**30:.1f} GiB at best."
    text = (
        f"{asked}: does not fit; {most.weights}-bit weights with {_words(most)} in the KV cache hold "
        f"{most.sequences:,}"
    )
    if most.needed_bytes is not None and most.longest_session is not None:
        text += (
            f", or so many of {most.longest_session:,} tokens, and would need "
            f"{most.needed_bytes / 2**30:.1f} GiB"
        )
    return text + "."
