"""What llama.cpp's converter makes of each architecture: names, orders of rows, and its config.json again.

Where it already splits or unscrambles a published tensor (InternLM2's wqkv, Baichuan's W_pack), the file is a
Llama's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from turbomill.convert.gguf.metadata import Metadata
from turbomill.convert.gguf.rope import rope_parameters
from turbomill.errors import CheckpointError, UnsupportedModelError

Fields = dict[str, Any]
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def _nothing(_meta: Metadata) -> Fields:
    return {}


@dataclass(frozen=True)
class GgufModel:
    """One architecture of llama.cpp. `names` are those of a layer, without `blk.N.`, in Hugging Face's."""

    architecture: str  # the Hugging Face class
    kind: str  # its model_type
    names: dict[str, str]
    config: Callable[[Metadata], Fields] = _nothing  # what its config has beyond the common keys
    experts: dict[str, str] = field(default_factory=dict)  # stacked [E, N, K] -> name with {e}
    interleaved: bool = False  # rows of q and k: each head's halves interleaved, for RoPE on neighbours
    norm_offset: float = 0.0  # what the converter added to every norm
    split_qkv: bool = False  # attn_qkv is q, k and v, one after the other
    partial_rope: bool = False


def _llama(meta: Metadata) -> Fields:
    biases = {part: meta.has(f"blk.0.attn_{part}.bias") for part in ("q", "output")}
    mlp = meta.has("blk.0.ffn_gate.bias")
    if biases["q"] and not biases["output"]:  # Llama has both or none
        return {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"} | {
            "qkv_bias": True,
            "bias": mlp,
        }
    return {"attention_bias": biases["q"], "mlp_bias": mlp}


def _mixtral(meta: Metadata) -> Fields:
    return {
        "num_local_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "sliding_window": None,
    }


def _baichuan(meta: Metadata) -> Fields:
    # Baichuan2's head is used as the file has it, as llama.cpp does: who converts one normalises it first.
    if meta.whole("block_count") == 40:
        raise UnsupportedModelError(
            f"{meta.path}: this is Baichuan 13B, whose ALiBi attention is not supported; supported: 7B"
        )
    return {}


def _moe(meta: Metadata) -> Fields:
    shape = meta.shapes.get("blk.0.ffn_gate_exps.weight")
    if shape is None or len(shape) != 3:
        raise CheckpointError(f"{meta.path}: no stacked tensor blk.0.ffn_gate_exps.weight")
    return {
        "num_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "moe_intermediate_size": shape[1],
        "intermediate_size": meta.whole("feed_forward_length", shape[1]),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(meta: Metadata) -> Fields:
    shared = meta.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))
    return _moe(meta) | {
        "shared_expert_intermediate_size": shared[0],
        "norm_topk_prob": False,
        "qkv_bias": meta.has("blk.0.attn_q.bias"),
    }


def _qwen3_moe(meta: Metadata) -> Fields:
    return _moe(meta) | {"norm_topk_prob": True, "attention_bias": meta.has("blk.0.attn_q.bias")}


def _gemma(meta: Metadata, largest: int) -> Fields:
    """Only the 27B models, of `largest` layers, scale queries by other than the size of a head."""
    heads, _, dim = meta.heads
    wide = meta.whole("block_count") == largest
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": meta.whole("embedding_length") // heads if wide else dim,
        "sliding_window": meta.whole("attention.sliding_window"),
    }


def _gemma2(meta: Metadata) -> Fields:
    return _gemma(meta, 46) | {
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata) -> Fields:
    """Five local layers, with a RoPE of their own, to a global one."""
    period = meta.whole("attention.sliding_window_pattern", 6)
    layers = range(meta.whole("block_count"))
    local = {"rope_type": "default", "rope_theta": meta.real("rope.freq_base_swa", 10000.0)}
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return _gemma(meta, 62) | {
        "rope_parameters": {"full_attention": rope_parameters(meta, {}), "sliding_attention": local},
        "layer_types": [f"{'full' if (i + 1) % period == 0 else 'sliding'}_attention" for i in layers],
        **caps,
    }


def _phi3(meta: Metadata) -> Fields:
    window = meta.get("attention.sliding_window")
    original = meta.get("rope.scaling.original_context_length")
    return {
        "sliding_window": window or None,
        **({"original_max_position_embeddings": original} if original else {}),
    }


def _glm(meta: Metadata) -> Fields:
    return {"attention_bias": meta.has("blk.0.attn_q.bias") or meta.has("blk.0.attn_qkv.bias")}


LLAMA = GgufModel("LlamaForCausalLM", "llama", ATTENTION | MLP, _llama, interleaved=True)
MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    kind="mixtral",
    names=ATTENTION | {"ffn_norm": MLP["ffn_norm"], "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    },
    config=_mixtral,
)
QWEN2 = GgufModel("Qwen2ForCausalLM", "qwen2", ATTENTION | MLP)
QWEN3 = GgufModel("Qwen3ForCausalLM", "qwen3", ATTENTION | HEAD_NORMS | MLP)
QWEN2_MOE = GgufModel(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    ATTENTION
    | {
        "ffn_norm": MLP["ffn_norm"],
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    _qwen2_moe,
    experts={name: f"mlp.experts.{{e}}.{part}" for name, part in EXPERTS.items()},
)
QWEN3_MOE = replace(
    QWEN2_MOE,
    architecture="Qwen3MoeForCausalLM",
    kind="qwen3_moe",
    names=ATTENTION | HEAD_NORMS | {"ffn_norm": MLP["ffn_norm"], "ffn_gate_inp": "mlp.gate"},
    config=_qwen3_moe,
)
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA2 = GgufModel("Gemma2ForCausalLM", "gemma2", ATTENTION | MLP | GEMMA_NORMS, _gemma2, norm_offset=1.0)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    kind="gemma3_text",
    names=GEMMA2.names | HEAD_NORMS,
    config=_gemma3,
)
PHI3 = GgufModel(
    "Phi3ForCausalLM",
    "phi3",
    ATTENTION | FUSED_MLP | {"attn_qkv": "self_attn.qkv_proj", "ffn_norm": "post_attention_layernorm"},
    _phi3,
    partial_rope=True,
)
GLM = GgufModel(
    "GlmForCausalLM",
    "glm",
    ATTENTION | FUSED_MLP | {"ffn_norm": "post_attention_layernorm"},
    _glm,
    split_qkv=True,
    partial_rope=True,
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    kind="glm4",
    names=GLM.names
    | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
)
MODELS = {
    "llama": LLAMA,
    "internlm2": LLAMA,
    "baichuan": replace(LLAMA, config=_baichuan),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2moe": QWEN2_MOE,
    "qwen3moe": QWEN3_MOE,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "chatglm": GLM,
    "glm4": GLM4,
}


def find_model(meta: Metadata) -> GgufModel:
    """The file's architecture. Raises UnsupportedModelError for another."""
    if meta.arch not in MODELS:
        raise UnsupportedModelError(
            f"{meta.path}: GGUF architecture {meta.arch} is not supported; supported: {', '.join(MODELS)}"
        )
    if meta.get("expert_count") and meta.arch == "llama":
        return MIXTRAL
    if meta.get("expert_count") and not MODELS[meta.arch].experts:
        raise UnsupportedModelError(f"{meta.path}: mixture-of-experts {meta.arch} models are not supported")
    return MODELS[meta.arch]


def config_of(meta: Metadata, model: GgufModel, factors: dict[str, Tensor], vocab: int, tied: bool) -> Fields:
    """The model's config.json, without its dtype and special ids."""
    heads, kv_heads, dim = meta.heads
    rope = rope_parameters(meta, factors)
    if "partial_rotary_factor" in rope and not model.partial_rope:
        raise UnsupportedModelError(f"{meta.path}: RoPE over a part of each head is not supported")
    partial = (
        {"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}
    )
    common = {
        "architectures": [model.architecture],
        "model_type": model.kind,
        "vocab_size": vocab,
        "hidden_size": meta.whole("embedding_length"),
        "num_hidden_layers": meta.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.whole("context_length"),
        "rope_parameters": rope,
        **partial,
        "tie_word_embeddings": tied,
    }
    own = model.config(meta)
    if "intermediate_size" not in own:
        common["intermediate_size"] = meta.whole("feed_forward_length")
    return common | own
