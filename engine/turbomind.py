"""The engine over the native core: opens a store, allocates the KV cache, generates."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbomill.engine.cache_size import cache_block_count, show_bytes
from turbomill.engine.config import EngineConfig
from turbomill.engine.device import activation_bits, free_device_memory, resolve_device
from turbomill.engine.front import EngineFront, session_length
from turbomill.engine.requests import EngineError, EngineInfo
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


class TurbomindEngine(EngineFront):
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
        self._device, chosen = resolve_device(self.config.device, self._core)
        if self.config.kv_16bit_layers:
            self.config.kv.check_layers(self.store.model["num_layers"])
        self.info = EngineInfo("turbomind", self._device, reason, self.config.kv.describe(self._cache_dtype))
        logger.info("device %s: %s", self._device, chosen)
        if self.config.deterministic and self._device != "cpu":
            raise UsageError(f"deterministic is for the device cpu, and this is {self._device}")
        context = self.store.context_length
        super().__init__(
            _tokenizer(self.store),
            vocab_size=self.store.model["vocab_size"],
            eos_token_ids=self.store.eos_token_ids,
            context_length=context,
            session_len=session_length(self.config.session_len, context),
            make_request=self._core.Request,
        )
        if original := self.store.model.get("rope_original_context"):
            kind = "long" if self.session_len > original else "short"
            logger.info(
                "sessions of up to %d tokens: RoPE with the %s-context factors", self.session_len, kind
            )
        self._attach(self._start())

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
            "session_len": self.session_len,
            "max_prefill_token_num": config.max_prefill_token_num,
            "block_len": config.cache_block_seq_len,
            **config.kv.settings,
            "cache_dtype": self._cache_dtype,
        }
        block_bytes = core.cache_block_bytes(model, core.EngineConfig(**settings, cache_block_count=1))
        weight_bytes = sum(tensor.nbytes for tensor in store.tensors.values())
        blocks = cache_block_count(
            config,
            self.session_len,
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
        logger.info(
            "engine turbomind on %s (%s): weights %s, session %d, KV cache %d blocks of %d tokens (%s, %s)",
            self.info.backend,
            self.info.reason,
            show_bytes(weight_bytes),
            self.session_len,
            blocks,
            config.cache_block_seq_len,
            config.kv.describe(settings["cache_dtype"]),
            show_bytes(blocks * block_bytes),
        )
        return engine

    def update_params(self, model: str | Path | Store) -> None:
        """Go on with the weights of another store; see AsyncEngine."""
        store = open_model(model) if isinstance(model, str | os.PathLike) else model
        different = difference(self.store, store)
        if different:
            raise UsageError(f"{store.path}: cannot take the place of {self.store.path}: {different}")
        self._bridge.control("update", tensor_refs(store, self._core))
        self.store = store


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
