"""Tiny random checkpoints that turbomill.convert does not know, and their own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from turbomill.engine.config import EngineConfig
from turbomill.engine.pytorch.engine import PytorchEngine

VOCAB = 257
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
KV = {"num_key_value_heads": 2}
IDS = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
# Over the paged attention: learned positions, parallel blocks, layers that share keys, windows, sinks in the
# softmax, latent heads.
PAGED: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "gpt_neox": {"rotary_pct": 0.5},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "laurel_rank": 8, **KV},
        **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "altup_num_inputs": 2},
        **{"activation_sparsity_pattern": [0.0, 0.0], "head_dim": 16},
    },
    "olmo2": KV,
    "granite": KV | {"attention_multiplier": 0.2, "logits_scaling": 2.0},
    "starcoder2": KV | {"sliding_window": 13},
    "gpt_oss": KV | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 13},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 32},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    },
}
# With transformers' caches: position in the scores, states instead of keys (whose code cannot continue a text
# by several tokens), convolutions over tokens.
OWN: dict[str, dict[str, Any]] = {
    "falcon": {},
    "bloom": {"n_layer": 2, "n_head": 4, "seq_length": 256},
    "mamba": {},
    "lfm2": KV | {"layer_types": ["conv", "full_attention"]},
}


def make(kind: str, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a checkpoint of transformers' model_type `kind`, with the byte tokenizer; the model, in fp32."""
    torch.manual_seed(0)
    fields = (PAGED | OWN | {"llama": KV, "phi3": KV}).get(kind, {})
    sizes = {"vocab_size": VOCAB} if "n_embd" in fields else SIZES
    config = CONFIG_MAPPING[kind](**(sizes | IDS | fields | changes))
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def text(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    """Transformers' own, [T, V]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


@contextmanager
def engine(model: Any, **config: Any) -> Iterator[PytorchEngine]:
    """A PytorchEngine with small blocks, chunks and sessions."""
    defaults = {"session_len": 256, "num_threads": 1, "device": "cpu"}
    defaults |= {"cache_block_seq_len": 16, "max_prefill_token_num": 37}
    made = PytorchEngine(model, EngineConfig(**(defaults | config)))
    try:
        yield made
    finally:
        made.close()
