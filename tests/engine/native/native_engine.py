"""Drives turbomill._core directly, and makes tiny random checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turbomill import _core
from turbomill.convert.store import Store, convert_checkpoint


def load_blas() -> None:
    """What the CPU backend multiplies with. Machines that only test a GPU do without the package."""
    import scipy_openblas64

    _core.load_blas(str(Path(scipy_openblas64.get_lib_dir()) / scipy_openblas64.get_library(fullname=True)))


def tiny_llama(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> LlamaForCausalLM:
    """A random Llama saved under `path`. Weights are large enough that every part matters to the logits."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    config = LlamaConfig(**(defaults | fields))
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(path)
    # Read back: casting the module itself to 16 bits and up again would round its rotary frequencies too.
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def store_of(path: Path) -> Store:
    """The store of the checkpoint at `path`, beside it."""
    return convert_checkpoint(path, path.with_name(path.name + "-store"))


class Native:
    """An engine on a store, with blocking calls."""

    def __init__(self, store: Store, **config: Any) -> None:
        self._arrived = threading.Condition()
        self.outputs: dict[int, list[_core.Output]] = {}
        self.order: list[tuple[int, int]] = []  # (request id, tokens) as delivered
        if config.get("device", "cpu") == "cpu":
            load_blas()
        refs = [
            _core.TensorRef(t.name, t.layout, t.dtype, t.shape, str(t.path), t.offset, t.nbytes)
            for t in store.tensors.values()
        ]
        defaults = {"cache_block_count": 64, "session_len": 512, "cache_dtype": "float32", "num_threads": 2}
        self.engine = _core.Engine(
            _core.ModelConfig(**store.model),
            refs,
            _core.EngineConfig(**(defaults | config)),
            self._on_outputs,
        )

    def _on_outputs(self, outputs: list[_core.Output]) -> None:
        with self._arrived:
            for output in outputs:
                self.outputs.setdefault(output.id, []).append(output)
                self.order.append((output.id, len(output.token_ids)))
            self._arrived.notify_all()

    def submit(self, token_ids: list[int], max_new_tokens: int = 16, **fields: Any) -> int:
        return self.engine.submit(_core.Request(token_ids=token_ids, max_new_tokens=max_new_tokens, **fields))

    def wait(self, request_id: int, timeout: float = 60.0) -> list[_core.Output]:
        """All outputs of a request, once it ended."""
        with self._arrived:
            done = self._arrived.wait_for(
                lambda: (
                    bool(self.outputs.get(request_id)) and bool(self.outputs[request_id][-1].finish_reason)
                ),
                timeout,
            )
        assert done, f"request {request_id} did not end within {timeout} s: {self.engine.metrics().to_dict()}"
        return self.outputs[request_id]

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.wait(request_id) for token in output.token_ids]

    def finish(self, request_id: int) -> str:
        return self.wait(request_id)[-1].finish_reason

    def generate(self, token_ids: list[int], max_new_tokens: int = 16, **fields: Any) -> list[int]:
        return self.tokens(self.submit(token_ids, max_new_tokens, **fields))

    def logits(self, token_ids: list[int]) -> np.ndarray:
        outputs = self.wait(self.submit(token_ids, 0, return_logits=True))
        assert outputs[-1].finish_reason == "length", outputs[-1].error
        return np.concatenate([o.logits for o in outputs if o.logits is not None])

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
