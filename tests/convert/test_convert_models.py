"""The Llama architecture's declared facts against transformers' own model."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from turbomill.convert.cli import inspect
from turbomill.convert.models.base import architecture_table, find_architecture
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
            "MistralSmallForCausalLM is not supported; nearest supported: Mistral.*--backend pytorch",
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
    from turbomill.convert.checkpoint import open_checkpoint

    path = tiny()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": "small"}))
    with pytest.raises(CheckpointError, match="not a valid config of LlamaForCausalLM") as error:
        open_checkpoint(path).hf_config()
    assert "\n" not in str(error.value)


def test_the_readme_lists_the_architectures():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    listed = readme.split("<!-- architectures -->")[1].split("<!-- /architectures -->")[0].strip()
    assert listed == architecture_table(), "paste the output of `turbomill inspect --architectures`"


def test_inspect_lists_the_architectures():
    result = CliRunner().invoke(inspect, ["--architectures"])
    assert result.exit_code == 0 and result.stdout.strip() == architecture_table()
    result = CliRunner().invoke(inspect, ["--architectures", "--json"])
    assert json.loads(result.stdout)["LlamaForCausalLM"].startswith("Llama 2")
    assert CliRunner().invoke(inspect, []).exit_code == 2


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"architectures": ["BaichuanForCausalLM"], "hidden_size": 80}, "ALiBi"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"},
            "hidden_activation gelu is not supported; supported: gelu_pytorch_tanh",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "use_bidirectional_attention": True,
            },
            "use_bidirectional_attention",
        ),
        (
            {"architectures": ["Glm4ForCausalLM"], "rope_scaling": {"type": "ntk", "factor": 2.0}},
            "RoPE type ntk",
        ),
    ],
)
def test_variants_of_other_architectures_are_refused(fields, words):
    with pytest.raises(UnsupportedModelError, match=words) as error:
        find_architecture({**BASE, **fields})
    assert "\n" not in str(error.value)


def test_malformed_configs_are_one_line():
    odd = {**BASE, "architectures": ["Gemma3ForCausalLM"], "model_type": "llama"}
    for fields in ({}, {"rope_scaling": [1]}, {"rope_parameters": {"full_attention": 3}}):
        with pytest.raises(CheckpointError, match=r"config\.json") as error:
            find_architecture({**odd, **fields})
        assert "\n" not in str(error.value)


def test_published_configs_are_read():
    """As the models' config.json are on the hub, with keys left at their class's default left out."""
    gemma2 = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    }
    arch = find_architecture(gemma2)
    fields = arch.model_config(gemma2)
    assert arch.tied(gemma2) and fields["tie_word_embeddings"]
    assert fields["layer_windows"] == [4096, 0] * 13 and fields["embedding_scale"] == 48.0
    phi = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    }
    arch = find_architecture(phi)
    fields = arch.model_config(phi)
    assert fields["rotary_dim"] == 96 and fields["rope_original_context"] == 4096
    assert fields["rope_attention_factor"] == pytest.approx(1.1902, abs=1e-4)
    assert "layer_windows" not in fields  # as wide as the context
    assert torch.equal(2 * arch.rope_tables(phi)["rope_long"], arch.rope_inv_freq(phi))
    older = {**phi, "rope_scaling": {**phi["rope_scaling"], "type": "su"}}
    assert find_architecture(older).model_config(older) == fields
    with pytest.raises(CheckpointError, match="short_factor"):
        arch.rope({**phi, "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48}})
    mistral = {
        **BASE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    }
    assert "layer_windows" not in find_architecture(mistral).model_config(mistral)
