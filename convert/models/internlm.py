"""InternLM2 (its own names; q, k and v in one linear, grouped by KV head) and InternLM3 (Llama's names)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from turbomill.convert.models import llama
from turbomill.convert.models.base import Fusion, HfConfig, RunsAs, ScaleGroup, register
from turbomill.convert.models.hf import heads_of
from turbomill.convert.models.llama import LLAMA

if TYPE_CHECKING:
    from torch import Tensor


def _shapes2(config: HfConfig) -> dict[str, tuple[int, int]]:
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, kv_heads, dim = heads_of(config)
    return {
        "attention.wqkv": (hidden, (heads + 2 * kv_heads) * dim),
        "attention.wo": (heads * dim, hidden),
        "feed_forward.w1": (hidden, inter),
        "feed_forward.w3": (hidden, inter),
        "feed_forward.w2": (inter, hidden),
    }


def _biases2(config: HfConfig) -> dict[str, bool]:
    return {name: bool(config.get("bias")) and name.startswith("attention.") for name in _shapes2(config)}


def _ungrouped(config: HfConfig) -> Tensor:
    """Rows of wqkv, for each KV head [its query heads | k | v], in the order [Q|K|V]."""
    import torch

    heads, kv_heads, dim = heads_of(config)
    group = heads // kv_heads
    rows = torch.arange((heads + 2 * kv_heads) * dim).reshape(kv_heads, group + 2, dim)
    return torch.cat([rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()])


def _scale_groups2(_config: HfConfig) -> tuple[ScaleGroup, ...]:
    return (
        ScaleGroup("attention_norm", ("attention.wqkv",), "attention"),
        ScaleGroup("ffn_norm", ("feed_forward.w1", "feed_forward.w3"), "feed_forward"),
        ScaleGroup("feed_forward.w3", ("feed_forward.w2",), "feed_forward.w2"),
    )


def _biases3(config: HfConfig) -> dict[str, bool]:
    # Its own code's keys, or those that transformers' Llama implementation saves.
    qkv = bool(config.get("qkv_bias", config.get("attention_bias")))
    others = bool(config.get("bias", config.get("mlp_bias")))
    return {name: qkv if name in llama.ATTENTION else others for name in llama.linear_shapes(config)}


def _as_llama2(config: HfConfig) -> HfConfig:
    return {**config, "attention_bias": bool(config.get("bias"))}


def _as_llama3(config: HfConfig) -> HfConfig:
    """Llama has a bias on all of q, k, v and o or on none: those that are not there are zeros."""
    biases = _biases3(config)
    return {
        **config,
        "attention_bias": any(biases[name] for name in (*llama.ATTENTION, "self_attn.o_proj")),
        "mlp_bias": biases["mlp.up_proj"],
    }


INTERNLM2 = register(
    replace(
        LLAMA,
        name="InternLM2ForCausalLM",
        models="InternLM2, InternLM2.5",
        remote_code=True,
        embedding="model.tok_embeddings.weight",
        head="output.weight",
        norms={"attention_norm": "attention_norm", "ffn_norm": "ffn_norm"},
        fusions=(
            Fusion("w_qkv", ("attention.wqkv",), order=_ungrouped),
            Fusion("w_o", ("attention.wo",)),
            Fusion("w_gate_up", ("feed_forward.w1", "feed_forward.w3"), interleave=8),
            Fusion("w_down", ("feed_forward.w2",)),
        ),
        linear_shapes=_shapes2,
        linear_biases=_biases2,
        scale_groups=_scale_groups2,
        runs_as=RunsAs(
            LLAMA,
            rename=(
                ("model.tok_embeddings.", "model.embed_tokens."),
                ("output.", "lm_head."),
                (".attention_norm.", ".input_layernorm."),
                (".ffn_norm.", ".post_attention_layernorm."),
                (".attention.wo.", ".self_attn.o_proj."),
                (".feed_forward.w1.", ".mlp.gate_proj."),
                (".feed_forward.w3.", ".mlp.up_proj."),
                (".feed_forward.w2.", ".mlp.down_proj."),
            ),
            split={"attention.wqkv": llama.ATTENTION},
            config=_as_llama2,
        ),
    )
)

INTERNLM3 = register(
    replace(
        LLAMA,
        name="InternLM3ForCausalLM",
        models="InternLM3",
        linear_biases=_biases3,
        runs_as=RunsAs(LLAMA, config=_as_llama3),
    )
)
