"""The Llama architecture's declared facts against transformers' own model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from turbomill.convert.models.base import find_architecture
from turbomill.errors import CheckpointError, UnsupportedModelError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
        {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 1e4, "rope_scaling": YARN},
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"head_dim": 80},
    ],
)
def test_rope_is_transformers(fields):
    config = {**BASE, **fields}
    arch = find_architecture(config)
    expected = LlamaRotaryEmbedding(LlamaConfig(**config))
    inv_freq = arch.rope_inv_freq(config)
    assert inv_freq.dtype == torch.float32 and torch.equal(inv_freq, expected.inv_freq)
    assert arch.model_config(config)["rope_attention_factor"] == expected.attention_scaling


def test_the_two_spellings_agree():
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    new = {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    arch = find_architecture(old)
    assert torch.equal(arch.rope_inv_freq(old), arch.rope_inv_freq(new))
    assert not torch.equal(arch.rope_inv_freq(old), arch.rope_inv_freq({**BASE, "rope_theta": 5e5}))


@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 32}, {"tie_word_embeddings": True}],
)
def test_declared_tensors_are_the_models(fields):
    config = {**BASE, **fields}
    arch = find_architecture(config)
    state = {k: tuple(v.shape) for k, v in LlamaForCausalLM(LlamaConfig(**config)).state_dict().items()}
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight")
    declared = set(arch.other_weights(config))
    for index in range(2):
        for linear, (k, n) in arch.linear_shapes(config).items():
            name = f"{arch.layer(index)}{linear}"
            assert state[f"{name}.weight"] == (n, k)
            declared.add(f"{name}.weight")
            if arch.linear_biases(config)[linear]:
                declared.add(f"{name}.bias")
    assert declared == set(state)
    assert set(arch.linears) == set(arch.linear_shapes(config))


def test_model_config_has_the_native_fields():
    fields = find_architecture(BASE).model_config({**BASE, "tie_word_embeddings": True, "rms_norm_eps": 1e-5})
    assert fields == {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "norm_eps": 1e-5,
        "rope_attention_factor": 1.0,
        "tie_word_embeddings": True,
    }


def test_scale_groups_name_modules_of_the_layer():
    arch = find_architecture(BASE)
    model = LlamaForCausalLM(LlamaConfig(**BASE))
    groups = arch.scale_groups(BASE)
    assert {linear for group in groups for linear in group.linears} == set(arch.linears)
    for group in groups:
        for name in (group.previous, group.module, *group.linears):
            model.model.layers[0].get_submodule(name)


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"architectures": ["MistralSmallForCausalLM"]},
            "MistralSmallForCausalLM is not supported; nearest supported: MistralForCausalLM, ",
        ),
        ({"architectures": None, "model_type": "qwen3_5"}, "model_type qwen3_5 .* nearest supported: Qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE type longrope"),
        ({"num_key_value_heads": 3}, "4 query heads over 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_other_models_are_refused(fields, words):
    with pytest.raises(UnsupportedModelError, match=words):
        find_architecture({**BASE, **fields})


def test_missing_size_is_named():
    config = {k: v for k, v in BASE.items() if k != "hidden_size"}
    with pytest.raises(CheckpointError, match="hidden_size missing"):
        find_architecture(config)


def test_invalid_config_is_one_line(tiny):
    import json

    from turbomill.convert.checkpoint import open_checkpoint

    path = tiny()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": "small"}))
    with pytest.raises(CheckpointError, match="not a valid llama config") as error:
        open_checkpoint(path).hf_config()
    assert "\n" not in str(error.value)
