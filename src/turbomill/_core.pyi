"""The native engine (csrc). Struct fields are declared once in C++ and reflected here."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def build_info() -> dict[str, Any]:
    """What was compiled in: {"backends": ["cpu"] or ["cpu", "cuda"], "isa": [...], "compiler": ...}."""

def cpu_features() -> dict[str, Any]:
    """{"isa": the kernel set chosen at run time, "features": [names], "int8": whether bytes multiply}."""

def cuda_devices() -> list[dict[str, Any]]:
    """GPUs by number: [{"name", "capability": (major, minor), "free_bytes", "total_bytes"}]."""

repack: Any  # byte orders of 4-bit codes, for turbomill.convert.native
harness: Any  # the engine's decisions step by step, without its threads, for tests
kernels: Any  # single CPU kernels on numpy arrays, for tests and benchmarks
kernels_cuda: Any  # single GPU kernels and their timers; only in builds with the cuda backend

def load_blas(path: str) -> None:
    """Open the BLAS library (scipy-openblas64) the CPU backend uses. Must precede the first Engine."""

class ModelConfig:
    """Sizes of a decoder. Keyword arguments name the fields; an unknown one is a TypeError."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_attention_factor: float
    tie_word_embeddings: bool
    # Variants: what sets a model apart from Llama, whose way every default means (csrc/core/config.h)
    rotary_dim: int
    rope_original_context: int
    local_rope_layers: list[int]
    qk_norm: bool
    post_norms: bool
    embedding_scale: float
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    activation: str
    layer_windows: list[int]
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: list[int]
    def __init__(self, **fields: Any) -> None: ...
    def to_dict(self) -> dict[str, Any]: ...
    def variants(self) -> list[str]:
        """Names of the variants that are not at Llama's value."""

def require_known_variants(model: ModelConfig, backend: str, known: list[str]) -> None:
    """ValueError naming the variants of `model` that are not among `known`."""

class EngineConfig:
    """What the engine may use. Keyword arguments name the fields."""

    device: str  # "cpu", "cuda" (the first GPU) or "cuda:N"
    num_threads: int  # 0: every core the process may run on; cpu only
    max_batch_size: int  # sequences that run together
    session_len: int  # prompt + generated tokens of one sequence
    max_prefill_token_num: int  # token budget of one step
    block_len: int  # P, tokens per KV block
    cache_block_count: int
    quant_policy: int  # 0, 8, 4, 84 (K in 8 bits, V in 4), 16 (fp8 e4m3), 17 (fp8 e5m2)
    kv_rotation: bool
    kv_16bit_layers: list[int]
    cache_dtype: str  # "float32" | "float16" | "bfloat16", the KV cache under quant_policy 0
    eager_mode: bool  # never record decode steps as CUDA graphs; cuda only
    enable_prefix_caching: bool  # keep blocks for later prompts that begin alike
    def __init__(self, **fields: Any) -> None: ...
    def to_dict(self) -> dict[str, Any]: ...

class TensorRef:
    """Where a store's tensor lies: `path`, byte `offset`, and its layout, dtype and shape."""

    def __init__(
        self, name: str, layout: str, dtype: str, shape: Sequence[int], path: str, offset: int, nbytes: int
    ) -> None: ...

class Request:
    """One generation. `max_new_tokens=0` only runs the prompt (for `return_logits`)."""

    token_ids: list[int]
    max_new_tokens: int
    temperature: float  # 0 is greedy
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    logprobs: int  # likeliest tokens to report beside each token; -1: report nothing
    prompt_logprobs: int  # likewise for the prompt's tokens from the second on
    seed: int  # same seed, same text, whatever the batch
    stop_token_ids: list[int]  # includes EOS unless the caller ignores it
    return_logits: bool  # fp32 logits of every prompt position
    priority: int  # lower goes first
    repetition_penalty: float  # divides the logits of tokens that occurred, multiplies negative ones
    presence_penalty: float  # subtracted from the logits of tokens that were generated
    frequency_penalty: float  # likewise, times how often
    logit_bias_ids: list[int]
    logit_biases: list[float]  # added to the logits of those
    min_new_tokens: int  # until then no stop token is chosen
    bad_words: list[list[int]]  # token sequences that are never completed
    allowed_token_ids: list[int]  # empty: all
    guided: bool  # every token waits until Engine.allow() has said which may come
    def __init__(self, **fields: Any) -> None: ...

class Logprobs:
    """log softmax of the model's own logits, whatever the temperature and the rules."""

    logprob: float  # of the token itself
    top: list[tuple[int, float]]  # the likeliest tokens, likeliest first

class Output:
    """What one step gave one request. Delivered in order; the last has a `finish_reason`."""

    id: int
    token_ids: list[int]  # new tokens; the stop token itself is not among them
    finish_reason: str  # "" while running, then "stop", "length", "cancelled" or "error"
    error: str
    logits: NDArray[np.float32] | None  # [t, V] for the next t prompt positions
    logprobs: list[Logprobs]  # one for each of token_ids, where wanted
    prompt_logprobs: list[Logprobs]  # of the next prompt tokens from the second on, where wanted
    cached_tokens: int  # prompt tokens that the prefix cache had

class Metrics:
    """A snapshot of the scheduler and the pools."""

    waiting: int
    running: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int  # used by nobody, kept for later prompts; free + cached + used = total
    steps: int
    recorded_steps: int  # of those, repeated from a recording (CUDA graphs)
    prompt_tokens: int
    cached_tokens: int  # of those, the ones that were not computed
    generated_tokens: int
    preemptions: int
    evictions: int  # of cached blocks
    steps_in_flight: int
    stalled_seconds: (
        float  # without a step's end while one is in flight, or with the engine thread not listening
    )
    paused: bool
    healthy: bool
    def to_dict(self) -> dict[str, Any]: ...

def cache_block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one KV block (P tokens, all layers)."""

class Engine:
    """Maps the weights, allocates the cache and starts the engine's threads.

    `on_outputs` is called on the signal thread with the outputs of one step.
    """

    def __init__(
        self,
        model: ModelConfig,
        tensors: Sequence[TensorRef],
        config: EngineConfig,
        on_outputs: Callable[[list[Output]], None],
    ) -> None: ...
    def submit(self, request: Request) -> int:
        """Queue a request; returns its id. Raises ValueError for one that can never run."""

    def cancel(self, request_id: int) -> None:
        """Ask for a request to end; its last output has finish_reason "cancelled"."""

    def allow(self, request_id: int, position: int, mask: bytes) -> None:
        """Say which tokens may follow the `position` generated ones of a guided request.

        `mask` has a bit for each token, in words of 32, the lowest first; an empty one ends the text with
        "stop". Raises ValueError for another size. For a request that has ended it does nothing.
        """

    def metrics(self) -> Metrics: ...
    def close(self) -> None:
        """End running requests as cancelled, join the threads, free the cache. Idempotent."""
