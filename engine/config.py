"""What a user sets: the engine's resources, and how one text is generated. Spelled as in LMDeploy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turbomill.engine.cache_size import CacheSize
from turbomill.engine.grammar import Grammar, parse_response_format
from turbomill.engine.kv_scheme import KvScheme, parse_quant_policy
from turbomill.errors import UsageError

CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("turbomind", "pytorch")
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
TUPLES = ("stop_words", "stop_token_ids", "bad_words", "bad_token_ids", "allowed_token_ids")
RANGES = (
    ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
)
CPU_ACTIVATIONS = ("auto", "float32", "int16", "int8")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def require(holds: bool, option: str, value: object, expected: str) -> None:
    """Raise UsageError naming the option and what it must be, unless `holds`."""
    if not holds:
        raise UsageError(f"{option} is {value!r}, expected {expected}")


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class EngineConfig:
    """What the engine may use. Raises UsageError when a value is out of range."""

    session_len: int | None = None  # prompt + generated tokens of one sequence; None: the model's context
    max_batch_size: int = 64  # sequences that run together
    max_prefill_token_num: int = 512  # token budget of one step; longer prompts are cut into chunks
    cache_max_entry_count: float | int | str = 0.8  # share of free memory, "20GiB", or a number of blocks
    cache_block_seq_len: int = 64  # P, tokens per KV block
    quant_policy: int | str = 0  # of the KV cache: 0 (cache_dtype), 8, 4, "k8v4", 16 (fp8 e4m3), 17 (e5m2)
    kv_rotation: bool | None = None  # store K and V rotated; None: as the policy does best
    kv_16bit_layers: tuple[int, ...] = ()  # layers that keep cache_dtype whatever the policy
    cache_dtype: str = "auto"  # "auto": the model's own dtype
    device: str = "auto"  # "cpu", "cuda" or "cuda:N"; "auto": a GPU when the core can use one, else the CPU
    num_threads: int = 0  # 0: every core the process may run on
    cpu_activations: str = "auto"  # what a CPU multiplies quantized weights with; "auto": int16 if it can
    deterministic: bool = False  # the same text to the last bit, whatever runs beside it; a CPU only
    enable_prefix_caching: bool = True  # keep KV blocks for later prompts that begin alike
    eager_mode: bool = False  # never record a GPU's decode steps as CUDA graphs
    backend: str = "turbomind"
    strict: bool = False  # backend pytorch: no falling back to transformers' own caches

    def __post_init__(self) -> None:
        require(
            self.session_len is None or _is_int(self.session_len, 2), "session_len", self.session_len, ">= 2"
        )
        for name in ("max_batch_size", "max_prefill_token_num", "cache_block_seq_len"):
            require(_is_int(getattr(self, name), 1), name, getattr(self, name), "an integer >= 1")
        require(
            _is_int(self.num_threads, 0), "num_threads", self.num_threads, "an integer >= 0 (0: every core)"
        )
        CacheSize.parse(self.cache_max_entry_count)
        require(
            isinstance(self.device, str) and DEVICE.fullmatch(self.device) is not None,
            "device",
            self.device,
            "auto, cpu, cuda or cuda:N",
        )
        for name, allowed in (
            ("cache_dtype", CACHE_DTYPES),
            ("cpu_activations", CPU_ACTIVATIONS),
            ("backend", BACKENDS),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {', '.join(str(a) for a in allowed)}")
        object.__setattr__(self, "quant_policy", self.kv.quant_policy)
        object.__setattr__(self, "kv_16bit_layers", self.kv.layers_16bit)

    @property
    def kv(self) -> KvScheme:
        """How the KV cache stores keys and values."""
        return KvScheme(parse_quant_policy(self.quant_policy), self.kv_rotation, tuple(self.kv_16bit_layers))


@dataclass(frozen=True)
class GenerationConfig:
    """How one text is generated. Raises UsageError when a value is out of range."""

    max_new_tokens: int | None = None  # None: what is left of the session
    do_sample: bool = False  # False is greedy
    temperature: float = 0.8  # 0 is greedy
    top_k: int = 50  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int | None = None  # same seed, same text; None: a new one for each request
    stop_words: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1  # texts for one prompt; with a seed, the i-th has seed + i
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest; 0: off
    repetition_penalty: float = 1.0  # of tokens in the prompt or the text; 1: off
    presence_penalty: float = 0.0  # of tokens in the text
    frequency_penalty: float = 0.0  # likewise, for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens; a dict will do
    min_new_tokens: int = 0  # until then the text does not stop
    bad_words: tuple[str, ...] = ()  # never written
    bad_token_ids: tuple[int, ...] = ()  # never chosen
    allowed_token_ids: tuple[int, ...] = ()  # the only ones that are chosen; empty: all
    logprobs: int | None = None  # report each token's log probability and those of so many likeliest
    prompt_logprobs: int | None = None  # likewise of the prompt, whose tokens are then all computed
    priority: int = 0  # requests with a lower one go first
    # What the text must be, as OpenAI and LMDeploy write it (grammar.py); a dict becomes a Grammar.
    response_format: Grammar | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        # Lists and dicts are what callers have at hand; tuples keep the config hashable.
        for name in TUPLES:
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | int) else tuple(value or ()))
        object.__setattr__(self, "response_format", parse_response_format(self.response_format))
        bias = dict(self.logit_bias or ())
        object.__setattr__(self, "logit_bias", tuple(bias.items()))
        require(
            self.max_new_tokens is None or _is_int(self.max_new_tokens, 1),
            "max_new_tokens",
            self.max_new_tokens,
            "an integer >= 1",
        )
        require(
            _is_number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "a number from 0 (greedy) to 100",
        )
        require(_is_int(self.top_k, 0, 2**31 - 1), "top_k", self.top_k, "an integer >= 0 (0: off)")
        require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(
            self.seed is None or _is_int(self.seed, -(2**63), 2**64 - 1),
            "seed",
            self.seed,
            "a 64-bit integer",
        )
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name)
            good = all(isinstance(word, str) and word for word in words)
            require(good, name, list(words), "strings that are not empty")
        for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            require(all(_is_int(token, 0, 2**31 - 1) for token in ids), name, list(ids), "token ids")
        for name, low, high in RANGES:
            value = getattr(self, name)
            require(_is_number(value) and low <= value <= high, name, value, f"a number from {low} to {high}")
        require(
            all(_is_int(t, 0, 2**31 - 1) and _is_number(b) and abs(b) <= 100 for t, b in self.logit_bias),
            "logit_bias",
            dict(self.logit_bias),
            "token ids with numbers from -100 to 100",
        )
        for name, low, high in (("n", 1, MAX_SAMPLES), ("min_new_tokens", 0, 2**31 - 1)):
            require(
                _is_int(getattr(self, name), low, high), name, getattr(self, name), f"an integer >= {low}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(
                value is None or _is_int(value, 0, MAX_LOGPROBS),
                name,
                value,
                f"None, or an integer from 0 to {MAX_LOGPROBS}",
            )
        require(_is_int(self.priority, -(2**31), 2**31 - 1), "priority", self.priority, "an integer")
        if self.response_format is not None and self.allowed_token_ids:
            raise UsageError("allowed_token_ids and response_format both say what may come: give one of them")

    @property
    def grammar(self) -> Grammar | None:
        """`response_format`, checked."""
        return parse_response_format(self.response_format)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0

    def samples(self) -> list[GenerationConfig]:
        """One config for each of the `n` texts. The prompt's log probabilities come with the first."""
        return [
            replace(
                self,
                n=1,
                seed=None if self.seed is None else self.seed + i,
                prompt_logprobs=None if i else self.prompt_logprobs,
            )
            for i in range(self.n)
        ]
