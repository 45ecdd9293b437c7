"""Options that every command with an engine has, written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import rich_click as click

from turbomill.engine.config import BACKENDS, CPU_ACTIVATIONS, EngineConfig
from turbomill.engine.kv_scheme import QUANT_POLICIES, KvScheme, parse_layers, parse_quant_policy

DEFAULTS = EngineConfig()

KV_OPTIONS = (
    click.option(
        "--quant-policy",
        type=click.Choice(list(QUANT_POLICIES)),
        default="0",
        show_default=True,
        help="KV cache: 0 keeps the model's dtype; 8, 4: bits; k8v4: K in 8 bits, V in 4; "
        "16, 17: fp8 e4m3, e5m2.",
    ),
    click.option(
        "--kv-rotation/--no-kv-rotation",
        default=None,
        help="Rotate K and V (Walsh-Hadamard) before they are stored.  [with 4 bits in K or V]",
    ),
    click.option(
        "--kv-16bit-layers",
        default="",
        metavar="I,J,...",
        help="Layers whose keys and values keep the model's dtype.",
    ),
)


def kv_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the KV cache's options to a command, which receives them as one `kv: KvScheme`."""

    @wraps(command)
    def with_scheme(
        *, quant_policy: str, kv_rotation: bool | None, kv_16bit_layers: str, **others: Any
    ) -> Any:
        kv = KvScheme(parse_quant_policy(quant_policy), kv_rotation, parse_layers(kv_16bit_layers))
        return command(kv=kv, **others)

    for option in reversed(KV_OPTIONS):
        with_scheme = option(with_scheme)
    return with_scheme


BACKEND = click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default=DEFAULTS.backend,
    show_default=True,
    help="Engine: turbomind, in C++; pytorch, over transformers' code, for whatever else that knows.",
)

ENGINE_OPTIONS = (
    click.option(
        "--session-len", type=int, help="Prompt and generated tokens of one sequence.  [model's context]"
    ),
    click.option(
        "--max-batch-size",
        type=int,
        default=DEFAULTS.max_batch_size,
        show_default=True,
        help="Sequences at a time.",
    ),
    click.option(
        "--max-prefill-token-num",
        type=int,
        default=DEFAULTS.max_prefill_token_num,
        show_default=True,
        help="Token budget of one step; longer prompts run in chunks.",
    ),
    click.option(
        "--cache-max-entry-count",
        default=str(DEFAULTS.cache_max_entry_count),
        show_default=True,
        help="KV cache: a share of free memory, a size such as 20GiB, or a number of blocks.",
    ),
    click.option(
        "--device",
        default=DEFAULTS.device,
        show_default=True,
        help="cpu, cuda, cuda:N, or auto: a GPU when the engine can use one.",
    ),
    click.option("--num-threads", type=int, default=0, help="CPU threads.  [every core]"),
    click.option(
        "--cpu-activations",
        type=click.Choice(CPU_ACTIVATIONS),
        default=DEFAULTS.cpu_activations,
        help="What a CPU multiplies quantized weights with: int16 loses nothing that shows, int8 a little; "
        "both need AVX-512 VNNI.  [int16 where the CPU has it]",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        help="The same results to the last bit, whatever runs beside them.  [CPU only]",
    ),
    click.option(
        "--enable-prefix-caching/--no-prefix-caching",
        default=DEFAULTS.enable_prefix_caching,
        show_default=True,
        help="Keep KV blocks for later prompts that begin alike.",
    ),
    click.option(
        "--eager-mode", is_flag=True, help="Launch every GPU kernel by itself, without CUDA graphs."
    ),
    BACKEND,
    click.option(
        "--strict",
        is_flag=True,
        help="Fail where backend pytorch would fall back to transformers' caches, one sequence at a time.",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the engine's options to a command, which receives them as one `config: EngineConfig`."""

    @wraps(command)
    def with_config(
        *,
        session_len: int | None,
        max_batch_size: int,
        max_prefill_token_num: int,
        cache_max_entry_count: str,
        kv: KvScheme,
        device: str,
        num_threads: int,
        cpu_activations: str,
        deterministic: bool,
        enable_prefix_caching: bool,
        eager_mode: bool,
        backend: str,
        strict: bool,
        **others: Any,
    ) -> Any:
        config = EngineConfig(
            session_len=session_len,
            max_batch_size=max_batch_size,
            max_prefill_token_num=max_prefill_token_num,
            cache_max_entry_count=cache_max_entry_count,
            quant_policy=kv.quant_policy,
            kv_rotation=kv.rotation,
            kv_16bit_layers=kv.layers_16bit,
            device=device,
            num_threads=num_threads,
            cpu_activations=cpu_activations,
            deterministic=deterministic,
            enable_prefix_caching=enable_prefix_caching,
            eager_mode=eager_mode,
            backend=backend,
            strict=strict,
        )
        return command(config=config, **others)

    decorated = kv_options(with_config)
    for option in reversed(ENGINE_OPTIONS):
        decorated = option(decorated)
    return decorated
