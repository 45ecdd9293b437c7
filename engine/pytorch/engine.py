"""The engine over transformers' modelling code: opens MODEL, chooses how it runs, allocates, generates."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from turbomill.engine.cache_size import cache_block_count, show_bytes
from turbomill.engine.config import EngineConfig
from turbomill.engine.front import EngineFront, session_length
from turbomill.engine.pytorch.attention import IMPLEMENTATION
from turbomill.engine.pytorch.core import Settings, TorchCore
from turbomill.engine.pytorch.device import failure, free_bytes, of_device, resolve_device
from turbomill.engine.pytorch.load import Source, open_source
from turbomill.engine.pytorch.probe import Probe, probe, set_attention
from turbomill.engine.pytorch.records import Request
from turbomill.engine.pytorch.rope import freeze_longrope
from turbomill.engine.pytorch.runner import OwnCacheRunner, PagedRunner, Runner
from turbomill.engine.requests import EngineError, EngineInfo
from turbomill.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from turbomill.convert.store import Store

logger = logging.getLogger("turbomill.engine")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PytorchEngine(EngineFront):
    """Runs MODEL on transformers' code. Implements AsyncEngine.

    MODEL is whatever turbomill.convert reads, which is dequantized, or a dense checkpoint of any causal
    language model that transformers knows.
    """

    def __init__(
        self,
        model: str | Path | Store | Source,
        config: EngineConfig | None = None,
        *,
        reason: str = "created directly",
    ) -> None:
        self.config = config or EngineConfig()
        check_options(self.config)
        self.source = open_source(model)
        device, chosen = resolve_device(self.config.device)
        session_len = self._choose_session_len()
        # CPUs are slow at 16 bits, and the native engine computes in fp32 there too.
        self._dtype = torch.float32 if device.type == "cpu" else self.source.dtype
        logger.info("device %s: %s", device, chosen)
        with cpu_threads(self.config.num_threads):
            network = self.source.load(self._dtype, device)
            try:
                found = probe(network, self.source.path)
            except RuntimeError as error:
                if not of_device(error):
                    raise
                raise EngineError(f"the pytorch engine cannot start: {failure(error)}") from error
        paged = found.layers is not None
        if not paged and self.config.strict:
            raise UnsupportedModelError(
                f"{self.source.path}: {found.reason}, so only {OwnCacheRunner.name} would do: "
                "leave out --strict"
            )
        freeze_longrope(network, session_len)
        runner, blocks = self._make_runner(network, found, session_len)
        kept = _name(self._cache_dtype if paged else self._dtype)
        if not paged:
            kept = f"{kept}, {runner.name}: {found.reason}"
            logger.warning("%s, without a prefix cache: %s", runner.name, found.reason)
        self.info = EngineInfo("pytorch", str(device), reason, kept)
        super().__init__(
            self.source.tokenizer(),
            vocab_size=found.vocab_size,
            eos_token_ids=self.source.checkpoint.eos_token_ids,
            context_length=self.source.context_length or session_len,
            session_len=session_len,
            make_request=Request,
        )
        settings = Settings(
            vocab_size=found.vocab_size,
            blocks=blocks,
            block_len=self.config.cache_block_seq_len,
            prefix_caching=self.config.enable_prefix_caching and paged,
            max_batch_size=self.config.max_batch_size,
            max_prefill_token_num=self.config.max_prefill_token_num,
            num_threads=self.config.num_threads,
        )
        self._prepare = partial(
            _prepared, dtype=self._dtype, device=device, paged=paged, session_len=session_len
        )
        try:
            core = TorchCore(runner, settings, partial(self._prepare, self.source), self._bridge.on_outputs)
        except (RuntimeError, MemoryError) as error:
            raise EngineError(f"the pytorch engine cannot start: {failure(error)}") from error
        self._attach(core)
        logger.info(
            "engine pytorch on %s (%s): %s in %s, weights %s, session %d, "
            "KV cache %d blocks of %d tokens (%s)",
            *(device, reason, self.source.architecture, _name(self._dtype)),
            show_bytes(sum(p.numel() * p.element_size() for p in network.parameters())),
            *(session_len, blocks, settings.block_len, kept),
        )

    def _choose_session_len(self) -> int:
        context = self.source.context_length
        if context is None:
            if self.config.session_len is None:
                raise UsageError(f"{self.source.path}: config.json has no context length: give --session-len")
            return self.config.session_len
        return session_length(self.config.session_len, context)

    def _make_runner(self, network: PreTrainedModel, found: Probe, session_len: int) -> tuple[Runner, int]:
        """How the model runs, and the number of KV blocks."""
        block_len, device = self.config.cache_block_seq_len, network.device
        if found.layers is not None:
            token_bytes = found.layers.token_elements * self._cache_dtype.itemsize
        else:
            token_bytes = max(1, found.own_token_bytes)
        blocks = cache_block_count(
            self.config, session_len, token_bytes * block_len, free_bytes(device), quantizable=False
        )
        if found.layers is None:
            return OwnCacheRunner(network, found.in_pieces), blocks
        return PagedRunner(network, found.layers, blocks, block_len, self._cache_dtype), blocks

    @property
    def _cache_dtype(self) -> torch.dtype:
        return DTYPES.get(self.config.cache_dtype, self.source.dtype)

    def update_params(self, model: str | Path | Store) -> None:
        """Go on with the weights of another checkpoint of the same form; see AsyncEngine."""
        source = open_source(model)
        different = difference(self.source, source)
        if different:
            raise UsageError(f"{source.path}: cannot take the place of {self.source.path}: {different}")
        self._bridge.control("update", partial(self._prepare, source))
        self.source = source


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with so many threads; 0: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepared(
    source: Source, *, dtype: torch.dtype, device: torch.device, paged: bool, session_len: int
) -> PreTrainedModel:
    """The model, as the engine that runs has its own."""
    model = source.load(dtype, device)
    if paged:
        set_attention(model, IMPLEMENTATION)
    freeze_longrope(model, session_len)
    return model


def check_options(config: EngineConfig) -> None:
    """Refuse what only the native engine does. Raises UsageError."""
    wrong = {
        "quant-policy": config.quant_policy != 0,
        "kv-rotation": bool(config.kv_rotation),
        "kv-16bit-layers": bool(config.kv_16bit_layers),
        "cpu-activations": config.cpu_activations not in ("auto", "float32"),
        "deterministic": config.deterministic,
    }
    if given := [f"--{name}" for name, refused in wrong.items() if refused]:
        raise UsageError(f"{', '.join(given)}: not of backend pytorch; use --backend turbomind")


def difference(running: Source, other: Source) -> str:
    """Why another checkpoint's weights cannot be used in the place of those that run; empty when they can."""

    def form(source: Source) -> dict[str, Any]:
        config = source.config.to_dict()
        noise = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
        return {key: value for key, value in config.items() if key not in noise}

    a, b = form(running), form(other)
    if keys := sorted(key for key in a | b if a.get(key) != b.get(key)):
        return f"another model ({', '.join(keys)} differ)"
    if (running.dtype, running.scheme) != (other.dtype, other.scheme):
        return "its weights are stored in another form"
    return ""
