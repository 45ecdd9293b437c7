"""Mixtures of experts: Mixtral, Qwen2-MoE (with an expert that every token uses) and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turbomill.convert.models import llama
from turbomill.convert.models.base import Fusion, HfConfig, RunsAs, ScaleGroup, register
from turbomill.convert.models.hf import parsed
from turbomill.convert.models.llama import ATTENTION_FUSIONS, LLAMA
from turbomill.convert.models.qwen import HEAD_NORMS

Shapes = dict[str, tuple[int, int]]
Matrices = dict[str, tuple[str, tuple[int, int]]]


def _mlp_fusions(
    store: str, prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
):
    return (
        Fusion(f"{store}w_gate_up", (prefix + gate, prefix + up), interleave=8),
        Fusion(f"{store}w_down", (prefix + down,)),
    )


def _mlp_shapes(fusions: tuple[Fusion, ...], experts: int, hidden: int, inter: int) -> Shapes:
    pair, down = fusions
    return {
        name: shape
        for expert in range(experts)
        for fusion, shape in ((pair, (hidden, inter)), (down, (inter, hidden)))
        for name in fusion.names(expert)
    }


def _scale_groups(config: HfConfig, *mlps: str, norm: str = "") -> tuple[ScaleGroup, ...]:
    """AWQ's groups of the attention and of each MLP, named by its prefix: up to down. What the router reads
    cannot be scaled, and so what `norm` gives to an MLP beside no router is all that gets a scale there."""
    groups = [ScaleGroup(f"{mlp}up_proj", (f"{mlp}down_proj",), f"{mlp}down_proj") for mlp in mlps]
    if norm:
        groups.append(ScaleGroup(norm, ("mlp.gate_proj", "mlp.up_proj"), "mlp"))
    return (*llama.attention_scale_groups(config), *groups)


def _attention_shapes(config: HfConfig) -> Shapes:
    shapes = llama.linear_shapes(config)
    return {name: shape for name, shape in shapes.items() if name.startswith("self_attn")}


# Mixtral

MIXTRAL_EXPERTS = _mlp_fusions("experts.", "block_sparse_moe.experts.{e}.", "w1", "w3", "w2")


def _mixtral_experts(config: HfConfig) -> int:
    return int(parsed(config).num_local_experts)


def _mixtral_shapes(config: HfConfig) -> Shapes:
    sizes = int(config["hidden_size"]), int(config["intermediate_size"])
    return _attention_shapes(config) | _mlp_shapes(MIXTRAL_EXPERTS, _mixtral_experts(config), *sizes)


def _mixtral_biases(config: HfConfig) -> dict[str, bool]:
    return dict.fromkeys(_mixtral_shapes(config), False)


def _mixtral_fusions(_config: HfConfig, _layer: int) -> tuple[Fusion, ...]:
    return (*ATTENTION_FUSIONS, *MIXTRAL_EXPERTS)


def _mixtral_matrices(config: HfConfig, _layer: int) -> Matrices:
    shape = (_mixtral_experts(config), int(config["hidden_size"]))
    return {"block_sparse_moe.gate": ("router", shape)}


def _mixtral_config(config: HfConfig) -> dict[str, Any]:
    return llama.windowed_config(config) | {
        "num_experts": _mixtral_experts(config),
        "experts_per_token": int(parsed(config).num_experts_per_tok),
        "expert_intermediate_size": int(config["intermediate_size"]),
        "norm_topk_prob": True,
    }


# The same under the names of transformers' modules, which differ from those of its checkpoints.
_MODULES = _mlp_fusions("experts.", "mlp.experts.{e}.")


def _module_shapes(config: HfConfig) -> Shapes:
    sizes = int(config["hidden_size"]), int(config["intermediate_size"])
    return _attention_shapes(config) | _mlp_shapes(_MODULES, _mixtral_experts(config), *sizes)


def _module_biases(config: HfConfig) -> dict[str, bool]:
    return dict.fromkeys(_module_shapes(config), False)


def _module_fusions(_config: HfConfig, _layer: int) -> tuple[Fusion, ...]:
    return (*ATTENTION_FUSIONS, *_MODULES)


def _module_matrices(config: HfConfig, _layer: int) -> Matrices:
    return {"mlp.gate": ("router", (_mixtral_experts(config), int(config["hidden_size"])))}


_MIXTRAL = replace(
    LLAMA,
    name="MixtralForCausalLM",
    models="Mixtral 8x7B, 8x22B",
    fusions=ATTENTION_FUSIONS,
    layer_fusions=_mixtral_fusions,
    num_experts=_mixtral_experts,
    matrices=_mixtral_matrices,
    linear_shapes=_mixtral_shapes,
    linear_biases=_mixtral_biases,
    scale_groups=llama.attention_scale_groups,
    model_config=_mixtral_config,
)
_RUN = RunsAs(
    replace(
        _MIXTRAL,
        layer_fusions=_module_fusions,
        matrices=_module_matrices,
        linear_shapes=_module_shapes,
        linear_biases=_module_biases,
    ),
    rename=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    ),
)
MIXTRAL = register(replace(_MIXTRAL, runs_as=_RUN))

# Qwen

QWEN_EXPERTS = _mlp_fusions("experts.", "mlp.experts.{e}.")
QWEN_SHARED = _mlp_fusions("shared.", "mlp.shared_expert.")
QWEN_DENSE = _mlp_fusions("", "mlp.")


def _qwen_experts(config: HfConfig) -> int:
    return int(parsed(config).num_experts)


def _dense_layers(config: HfConfig) -> list[int]:
    """Layers with an ordinary MLP."""
    found: Any = parsed(config)
    step, dense = int(found.decoder_sparse_step), found.mlp_only_layers or []
    return [i for i in range(int(config["num_hidden_layers"])) if i in dense or (i + 1) % step]


def _shared_size(config: HfConfig) -> int:
    return int(getattr(parsed(config), "shared_expert_intermediate_size", 0))


def _qwen_shapes(config: HfConfig) -> Shapes:
    found: Any = parsed(config)
    hidden, shared = int(config["hidden_size"]), _shared_size(config)
    return {
        **_attention_shapes(config),
        **_mlp_shapes(QWEN_EXPERTS, _qwen_experts(config), hidden, int(found.moe_intermediate_size)),
        **(_mlp_shapes(QWEN_SHARED, 1, hidden, shared) if shared else {}),
        **_mlp_shapes(QWEN_DENSE, 1, hidden, int(config["intermediate_size"])),
    }


def _qwen_biases(config: HfConfig) -> dict[str, bool]:
    """Qwen2 has qkv_bias, on q, k and v; Qwen3 attention_bias, on all four."""
    found = parsed(config)
    qkv = bool(getattr(found, "qkv_bias", getattr(found, "attention_bias", False)))
    output = bool(getattr(found, "attention_bias", False))
    with_bias = {"self_attn.o_proj": output, **dict.fromkeys(llama.ATTENTION, qkv)}
    return {name: with_bias.get(name, False) for name in _qwen_shapes(config)}


def _qwen_fusions(config: HfConfig, layer: int) -> tuple[Fusion, ...]:
    if layer in _dense_layers(config):
        return (*ATTENTION_FUSIONS, *QWEN_DENSE)
    return (*ATTENTION_FUSIONS, *QWEN_EXPERTS, *(QWEN_SHARED if _shared_size(config) else ()))


def _qwen_matrices(config: HfConfig, layer: int) -> Matrices:
    if layer in _dense_layers(config):
        return {}
    hidden = int(config["hidden_size"])
    shared: Matrices = {"mlp.shared_expert_gate": ("shared_gate", (1, hidden))}
    router: Matrices = {"mlp.gate": ("router", (_qwen_experts(config), hidden))}
    return router | (shared if _shared_size(config) else {})


def _qwen_groups(config: HfConfig) -> tuple[ScaleGroup, ...]:
    return _scale_groups(config, "mlp.shared_expert.", "mlp.", norm="post_attention_layernorm")


def _qwen_config(config: HfConfig) -> dict[str, Any]:
    found: Any = parsed(config)
    dense, shared = _dense_layers(config), _shared_size(config)
    fields = {
        "num_experts": _qwen_experts(config),
        "experts_per_token": int(found.num_experts_per_tok),
        "expert_intermediate_size": int(found.moe_intermediate_size),
        "norm_topk_prob": bool(found.norm_topk_prob),
    }
    optional = {"dense_layers": dense, "shared_expert_intermediate_size": shared}
    return llama.windowed_config(config) | fields | {key: value for key, value in optional.items() if value}


def _qwen3_config(config: HfConfig) -> dict[str, Any]:
    return _qwen_config(config) | {"qk_norm": True}


QWEN2_MOE = register(
    replace(
        _MIXTRAL,
        name="Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        layer_fusions=_qwen_fusions,
        num_experts=_qwen_experts,
        matrices=_qwen_matrices,
        linear_shapes=_qwen_shapes,
        linear_biases=_qwen_biases,
        scale_groups=_qwen_groups,
        model_config=_qwen_config,
    )
)

QWEN3_MOE = register(
    replace(
        QWEN2_MOE,
        name="Qwen3MoeForCausalLM",
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        head_norms=HEAD_NORMS,
        model_config=_qwen3_config,
    )
)
