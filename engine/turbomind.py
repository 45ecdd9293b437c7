"""The engine over the native core: opens a store, allocates the KV cache, generates."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from turbomill.engine.bridge import Bridge
from turbomill.engine.cache_size import cache_block_count, show_bytes
from turbomill.engine.config import EngineConfig, GenerationConfig
from turbomill.engine.detokenize import TextStream
from turbomill.engine.device import activation_bits, free_device_memory, resolve_device
from turbomill.engine.guide import Guide, Guides
from turbomill.engine.native_requests import native_request, next_arrived, raise_failure, token_logprob
from turbomill.engine.prompts import PromptEncoder
from turbomill.engine.requests import (
    EngineError,
    EngineInfo,
    EngineMetrics,
    FinishReason,
    GenerationOutput,
    Prompt,
    PromptError,
    Usage,
)
from turbomill.engine.stores import open_model
from turbomill.errors import UsageError

if TYPE_CHECKING:
    from turbomill import _core
    from turbomill.convert.store import Store

logger = logging.getLogger("turbomill.engine")

_blas_lock = threading.Lock()
_blas_loaded = False


def _load_core() -> Any:
    """The native module, with its BLAS loaded (once in a process)."""
    global _blas_loaded
    try:
        from turbomill import _core
    except ImportError as error:
        raise EngineError(
            f"the native engine turbomill._core is not built ({error}): run `make install`"
        ) from error
    with _blas_lock:
        if not _blas_loaded:
            import scipy_openblas64

            _core.load_blas(
                str(Path(scipy_openblas64.get_lib_dir()) / scipy_openblas64.get_library(fullname=True))
            )
            _blas_loaded = True
    return _core


class TurbomindEngine:
    """Runs MODEL (a store, or anything that converts to one) on the native core. Implements AsyncEngine."""

    def __init__(
        self,
        model: str | Path | Store,
        config: EngineConfig | None = None,
        *,
        reason: str = "created directly",
    ) -> None:
        self.config = config or EngineConfig()
        self._core = _load_core()
        self.store = open_model(model) if isinstance(model, str | os.PathLike) else model
        self._prompts = PromptEncoder(_tokenizer(self.store), self.store.model["vocab_size"])
        self._session_len = self._choose_session_len()
        self._device, chosen = resolve_device(self.config.device, self._core)
        if self.config.kv_16bit_layers:
            self.config.kv.check_layers(self.store.model["num_layers"])
        self.info = EngineInfo("turbomind", self._device, reason, self.config.kv.describe(self._cache_dtype))
        logger.info("device %s: %s", self._device, chosen)
        if self.config.deterministic and self._device != "cpu":
            raise UsageError(f"deterministic is for the device cpu, and this is {self._device}")
        self._guides = Guides(
            self._prompts.tokenizer, self.store.model["vocab_size"], self.store.eos_token_ids
        )
        self._bridge = Bridge(self._guides.run)
        self._engine = self._start()

    def _choose_session_len(self) -> int:
        context = self.store.context_length
        session_len = self.config.session_len or context
        if session_len > context:
            raise UsageError(
                f"session_len is {session_len}, expected at most the model's context of {context} tokens"
            )
        if original := self.store.model.get("rope_original_context"):
            kind = "long" if session_len > original else "short"
            logger.info("sessions of up to %d tokens: RoPE with the %s-context factors", session_len, kind)
        return session_len

    @property
    def _cache_dtype(self) -> str:
        return self.store.manifest["dtype"] if self.config.cache_dtype == "auto" else self.config.cache_dtype

    def _start(self) -> _core.Engine:
        core, config, store = self._core, self.config, self.store
        try:
            model = core.ModelConfig(**store.model)
        except TypeError as error:
            raise EngineError(
                f"{store.path}: the store describes a model this turbomill does not know ({error}); "
                "use the turbomill that wrote it, or convert the checkpoint again"
            ) from error
        settings: dict[str, Any] = {
            "device": self._device,
            "num_threads": config.num_threads,
            "activation_bits": activation_bits(config.cpu_activations, self._device, core),
            "eager_mode": config.eager_mode,
            "deterministic": config.deterministic,
            "enable_prefix_caching": config.enable_prefix_caching,
            "max_batch_size": config.max_batch_size,
            "session_len": self._session_len,
            "max_prefill_token_num": config.max_prefill_token_num,
            "block_len": config.cache_block_seq_len,
            **config.kv.settings,
            "cache_dtype": self._cache_dtype,
        }
        block_bytes = core.cache_block_bytes(model, core.EngineConfig(**settings, cache_block_count=1))
        weight_bytes = sum(tensor.nbytes for tensor in store.tensors.values())
        blocks = cache_block_count(
            config,
            self._session_len,
            block_bytes,
            max(free_device_memory(self._device, core) - weight_bytes, 0),
        )
        try:
            engine = core.Engine(
                model,
                tensor_refs(store, core),
                core.EngineConfig(**settings, cache_block_count=blocks),
                self._bridge.on_outputs,
            )
        except (ValueError, RuntimeError, MemoryError) as error:
            raise EngineError(f"the turbomind engine cannot start: {error}") from error
        self._bridge.attach(engine)
        logger.info(
            "engine turbomind on %s (%s): weights %s, session %d, KV cache %d blocks of %d tokens (%s, %s)",
            self.info.backend,
            self.info.reason,
            show_bytes(weight_bytes),
            self._session_len,
            blocks,
            config.cache_block_seq_len,
            config.kv.describe(settings["cache_dtype"]),
            show_bytes(blocks * block_bytes),
        )
        return engine

    @property
    def session_len(self) -> int:
        """The most tokens, prompt and generated together, of one sequence."""
        return self._session_len

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._prompts.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of text, chat messages, or token ids themselves. Raises PromptError."""
        return self._prompts.encode(prompt)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._prompts.decode(token_ids, skip_special_tokens)

    def generate(
        self, prompt: Prompt, gen: GenerationConfig | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Check the prompt now, run it when iterated; see AsyncEngine."""
        gen = gen or GenerationConfig()
        token_ids = self.encode(prompt)
        room = self._session_len - len(token_ids)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens, but a session holds {self._session_len} and "
                f"at least one must be generated: shorten the prompt or raise --session-len "
                f"(the model's context is {self.store.context_length})"
            )
        new_tokens = min(gen.max_new_tokens or room, room)
        if gen.n != 1:
            raise PromptError(f"n is {gen.n}, but one generation gives one text: pass each of gen.samples()")
        self._check_ids(gen)
        request = native_request(
            self._core,
            token_ids,
            new_tokens,
            gen,
            eos_token_ids=self.store.eos_token_ids,
            word_tokens=self._prompts.word_tokens,
        )
        start = self._guides.start(gen.grammar, gen.ignore_eos) if gen.grammar else None
        return self._generate(request, gen, start)

    def _check_ids(self, gen: GenerationConfig) -> None:
        vocab = self.store.model["vocab_size"]
        biased = [token for token, _ in gen.logit_bias]
        for name, ids in (
            ("logit_bias", biased),
            ("bad_token_ids", gen.bad_token_ids),
            ("allowed_token_ids", gen.allowed_token_ids),
        ):
            if ids and max(ids) >= vocab:
                raise PromptError(f"{name}: token id {max(ids)}, expected ids below {vocab}")

    async def _generate(
        self, request: _core.Request, gen: GenerationConfig, start: tuple[Guide, bytes] | None
    ) -> AsyncGenerator[GenerationOutput, None]:
        prompt, scored = request.token_ids, 1
        text = TextStream(
            lambda ids: self.decode(ids, gen.skip_special_tokens), gen.stop_words, gen.min_new_tokens
        )
        with self._bridge.submit(request, start) as stream:
            finish: FinishReason | None = None
            while finish is None:
                arrived = await next_arrived(stream)
                finish = arrived.finish
                before = text.tokens
                piece = text.feed(arrived.token_ids, final=finish is not None)
                if text.stopped:
                    finish = "stop"
                rows = arrived.prompt_logprobs
                of_prompt = [token_logprob(t, r) for t, r in zip(prompt[scored:], rows, strict=False)]
                scored += len(rows)
                usage = Usage(len(prompt), text.tokens, arrived.cached_tokens)
                count = text.tokens - before  # tokens behind a stop string, which had been sampled, go
                yield GenerationOutput(
                    piece,
                    tuple(arrived.token_ids[:count]),
                    usage,
                    finish,
                    tuple(arrived.logprobs[:count]),
                    tuple(of_prompt),
                )

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """fp32 logits [T, V] of every position of `token_ids` [T]."""
        ids = self.encode(list(token_ids))
        if len(ids) > self._session_len:
            raise PromptError(
                f"{len(ids)} tokens to score, but a session holds {self._session_len}: raise --session-len"
            )
        request = self._core.Request(token_ids=ids, max_new_tokens=0, return_logits=True)
        out: NDArray[np.float32] | None = None  # [T, V]
        filled = 0
        with self._bridge.submit(request) as stream:
            finished = False
            while not finished:
                for output in await stream.next():
                    finished = finished or bool(output.finish_reason)
                    raise_failure(output)
                    if output.logits is not None:
                        if out is None:
                            out = np.empty((len(ids), output.logits.shape[1]), np.float32)
                        out[filled : filled + len(output.logits)] = output.logits
                        filled += len(output.logits)
        if out is None or filled != len(ids):
            raise EngineError(
                f"the engine returned logits of {filled} of {len(ids)} positions (request cancelled)"
            )
        return out

    def metrics(self) -> EngineMetrics:
        """A snapshot of the scheduler and the KV pool."""
        now = self._engine.metrics()
        return EngineMetrics(**{field.name: getattr(now, field.name) for field in fields(EngineMetrics)})

    def pause(self) -> None:
        """Plan no more steps; return when none is in flight. Requests are accepted and wait."""
        self._bridge.control("pause")

    def resume(self) -> None:
        """Go on where pause() stopped."""
        self._bridge.control("resume")

    def sleep(self, level: int = 1) -> None:
        """Pause and give memory back; see AsyncEngine."""
        if level not in (1, 2):
            raise UsageError(f"the level of sleep is {level!r}, expected 1 (KV cache) or 2 (weights too)")
        self._bridge.control("sleep", level)

    def wakeup(self) -> None:
        """Take the memory again and go on; see AsyncEngine."""
        self._bridge.control("wake")

    def update_params(self, model: str | Path | Store) -> None:
        """Go on with the weights of another store; see AsyncEngine."""
        store = open_model(model) if isinstance(model, str | os.PathLike) else model
        different = difference(self.store, store)
        if different:
            raise UsageError(f"{store.path}: cannot take the place of {self.store.path}: {different}")
        self._bridge.control("update", tensor_refs(store, self._core))
        self.store = store

    def close(self) -> None:
        """End every request as cancelled and free everything. Idempotent."""
        self._bridge.close()
        self._guides.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tensor_refs(store: Store, core: Any) -> list[Any]:
    """The store's tensors as the native engine takes them."""
    return [
        core.TensorRef(t.name, t.layout, t.dtype, t.shape, str(t.path), t.offset, t.nbytes)
        for t in store.tensors.values()
    ]


def difference(running: Store, other: Store) -> str:
    """Why another store's weights cannot be used in the place of those that run; empty when they can."""
    if running.model != other.model:
        every = sorted(running.model | other.model)
        keys = [key for key in every if running.model.get(key) != other.model.get(key)]
        return f"another model ({', '.join(keys)} differ)"
    forms = [{name: (t.layout, t.dtype, t.shape) for name, t in s.tensors.items()} for s in (running, other)]
    names = sorted(name for name in forms[0] | forms[1] if forms[0].get(name) != forms[1].get(name))
    return f"{names[0]} is stored in another form" if names else ""


def _tokenizer(store: Store) -> Any | None:
    """The store's tokenizer; None when it has none and only token ids can be run."""
    if store.manifest["tokenizer"]["files"]:
        return store.tokenizer()
    logger.warning("the model has no tokenizer: prompts must be token ids, and there is no text")
    return None
