"""A tiny random checkpoint of every architecture, and transformers' model of the same weights.

Architectures that exist as remote code only are made from transformers' Llama: tensors are renamed and
joined as those models publish them, and the config has their keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Remote:
    """How a model of remote code publishes a Llama: its tensors, and back, and its config.json."""

    publish: Callable[[State, LlamaConfig], State]
    restore: Callable[[State, LlamaConfig], State]
    config: Callable[[LlamaConfig], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One model. `kind` is transformers' model_type; `session_len` what the engine is given."""

    architecture: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    remote: Remote | None = None
    session_len: int = 512

    def make(self, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """Save the checkpoint at `path`; returns the reference in fp32."""
        torch.manual_seed(0)
        config = CONFIG_MAPPING[self.kind](**(SIZES | self.fields | changes))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        _randomise(model)
        model.to(dtype).save_pretrained(path)
        if self.remote:
            state = self.remote.publish(load_file(path / "model.safetensors"), config)
            save_file(
                {name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors"
            )
            published = {"architectures": [self.architecture], **self.remote.config(config)}
            (path / "config.json").write_text(json.dumps(published))
        return self.reference(path, config)

    def reference(self, path: Path, config: Any) -> Any:
        """transformers' model of the dense checkpoint at `path`, in fp32."""
        if self.remote is None:
            return AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        model = LlamaForCausalLM(config).eval()
        state = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
        model.load_state_dict(self.remote.restore(state, config))
        return model


def _randomise(model: nn.Module) -> None:
    """Biases and norms that matter: their initial zeros and ones would hide a missing one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _internlm2_names(state: State) -> State:
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    renamed = {}
    for name, tensor in state.items():
        published = name
        for old, new in names.items():
            published = published.replace(old, new)
        renamed[published] = tensor
    return renamed


def _internlm2(state: State, config: LlamaConfig) -> State:
    """q, k, v of each KV head together."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    state = _internlm2_names(state)
    for name in [name for name in state if "q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        q, k, v = (part.reshape(kv_heads, -1, dim, *part.shape[1:]) for part in parts)
        assert q.shape[1] == heads // kv_heads
        state[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat([q, k, v], 1).flatten(0, 2)
    return state


def _internlm2_back(state: State, config: LlamaConfig) -> State:
    kv_heads, dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads
    empty = LlamaForCausalLM(config).state_dict()
    restored = {
        name: state[renamed]
        for name in empty
        for renamed in _internlm2_names({name: empty[name]})
        if renamed in state
    }
    for name in [name for name in state if "wqkv" in name]:
        whole = state[name].reshape(kv_heads, group + 2, dim, *state[name].shape[1:])
        prefix = name.replace("attention.wqkv", "self_attn.{}_proj")
        restored[prefix.format("q")] = whole[:, :group].flatten(0, 2)
        restored[prefix.format("k")] = whole[:, group].flatten(0, 1)
        restored[prefix.format("v")] = whole[:, group + 1].flatten(0, 1)
    return restored


def _baichuan(state: State, _config: LlamaConfig) -> State:
    for name in [name for name in state if "q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    return state


def _baichuan_back(state: State, _config: LlamaConfig) -> State:
    restored = dict(state)
    for name in [name for name in state if "W_pack" in name]:
        for part, weight in zip("qkv", restored.pop(name).chunk(3), strict=True):
            restored[name.replace("W_pack", f"{part}_proj")] = weight
    return restored


def _baichuan2_back(state: State, config: LlamaConfig) -> State:
    head = state["lm_head.weight"]
    return _baichuan_back({**state, "lm_head.weight": head / head.norm(dim=1, keepdim=True)}, config)


def _without_output_bias(state: State, _config: LlamaConfig) -> State:
    """Llama has a bias on all of q, k, v, o or on none; InternLM3 may have those of q, k, v alone."""
    return {name: tensor for name, tensor in state.items() if not name.endswith("o_proj.bias")}


def _zero_output_bias(state: State, config: LlamaConfig) -> State:
    zeros = torch.zeros(config.hidden_size)
    layers = range(config.num_hidden_layers)
    return {**state, **{f"model.layers.{index}.self_attn.o_proj.bias": zeros for index in layers}}


def _published(kind: str, *dropped: str, **added: Any) -> Callable[[LlamaConfig], dict[str, Any]]:
    """A remote model's config.json: Llama's sizes, without `dropped`, with `added`."""
    known = [*SIZES, "rms_norm_eps", "hidden_act", "tie_word_embeddings"]

    def config(llama: LlamaConfig) -> dict[str, Any]:
        fields = {key: value for key, value in llama.to_dict().items() if key in known and key not in dropped}
        return {**fields, "model_type": kind, **added}

    return config


DYNAMIC = {"rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
INTERNLM2 = Remote(_internlm2, _internlm2_back, _published("internlm2", "head_dim", bias=True, **DYNAMIC))
INTERNLM3 = Remote(
    _without_output_bias,
    _zero_output_bias,
    _published("internlm3", bias=False, qkv_bias=True, **DYNAMIC),
)
BAICHUAN = Remote(
    _baichuan, _baichuan_back, _published("baichuan", "head_dim", "num_key_value_heads", model_max_length=512)
)
BAICHUAN2 = Remote(BAICHUAN.publish, _baichuan2_back, BAICHUAN.config)
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
LONGROPE = {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    },
}
GEMMA = {
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GLM = {"attention_bias": True, "head_dim": 32, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}

CASES: dict[str, Case] = {
    "qwen2": Case("Qwen2ForCausalLM", "qwen2"),
    "qwen2-window": Case(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": Case("MistralForCausalLM", "mistral", {"sliding_window": None}),
    "mistral-window": Case("MistralForCausalLM", "mistral", {"sliding_window": 33, "num_key_value_heads": 1}),
    "qwen3": Case("Qwen3ForCausalLM", "qwen3", {"head_dim": 32, **THETA}),
    "internlm2": Case("InternLM2ForCausalLM", "llama", {"attention_bias": True, **THETA}, INTERNLM2),
    "internlm3": Case(
        "InternLM3ForCausalLM",
        "llama",
        {"attention_bias": True, "head_dim": 32, **THETA},
        INTERNLM3,
    ),
    "baichuan": Case("BaiChuanForCausalLM", "llama", {"num_key_value_heads": 4}, BAICHUAN),
    "baichuan2": Case("BaichuanForCausalLM", "llama", {"num_key_value_heads": 4}, BAICHUAN2),
    "phi3": Case("Phi3ForCausalLM", "phi3", {"sliding_window": 47}),
    "phi3-short": Case("Phi3ForCausalLM", "phi3", LONGROPE, session_len=128),
    "phi3-long": Case("Phi3ForCausalLM", "phi3", LONGROPE),
    "gemma2": Case("Gemma2ForCausalLM", "gemma2", GEMMA | SOFTCAPS),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        GEMMA | {"sliding_window_pattern": 2, "rope_parameters": GEMMA3_ROPE, "head_dim": 32},
    ),
    "glm": Case("GlmForCausalLM", "glm", GLM | {"partial_rotary_factor": 0.25}),
    "glm4": Case("Glm4ForCausalLM", "glm4", GLM),
    "mixtral": Case(
        "MixtralForCausalLM",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, **THETA},
    ),
    "qwen2-moe": Case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        MOE | {"shared_expert_intermediate_size": 128, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": Case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        MOE | {"norm_topk_prob": True, "decoder_sparse_step": 1, "head_dim": 32},
    ),
}
