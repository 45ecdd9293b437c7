"""compressed-tensors against a scalar reader, and both ways against the library that defines the format."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle import apply_quantization_config
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.find import find_format
from turbomill.convert.linear import QuantScheme
from turbomill.convert.reference import load_dense_model
from turbomill.errors import CheckpointError, UnsupportedModelError

SCHEMES = [
    QuantScheme(bits, group, symmetric)
    for bits, group in ((2, 32), (3, 16), (4, 32), (4, -1), (5, 64), (6, 32), (7, -1), (8, 32), (8, -1))
    for symmetric in (True, False)
]
K, N = 64, 24


class Tensors(dict):
    def has(self, name):
        return name in self

    def tensor(self, name):
        return self[name]


def args_of(scheme):
    group = {"strategy": "channel"} if scheme.group < 0 else {"group_size": scheme.group, "strategy": "group"}
    weights = QuantizationArgs(num_bits=scheme.bits, type="int", symmetric=scheme.symmetric, **group)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def resolved(scheme):
    return QuantScheme(scheme.bits, K if scheme.group < 0 else scheme.group, scheme.symmetric)


def field(words, index, bits):
    """Value `index` of a row of words: bits index*b .. index*b+b-1, low bits first."""
    number = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words))
    return number >> index * bits & 2**bits - 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_decodes_by_the_formula(make_linear, scheme):
    linear = make_linear(K, N, resolved(scheme), bias=True)
    form = CompressedTensorsFormat(scheme)
    tensors = Tensors(form.pack("x", linear))
    assert {n: tuple(t.shape) for n, t in tensors.items() if n != "x.bias"} == form.expected("x", K, N)
    assert tensors["x.weight_shape"].tolist() == [N, K]
    expected, half, groups = linear.dequantize(), 2 ** (scheme.bits - 1), linear.scales.shape[0]
    for n in range(0, N, 5):
        for k in range(K):
            g = k // (K // groups)
            code = field(tensors["x.weight_packed"][n].tolist(), k, scheme.bits) - half
            zero = 0
            if not scheme.symmetric:
                zero = field(tensors["x.weight_zero_point"][:, g].tolist(), n, scheme.bits) - half
            value = (code - zero) * float(tensors["x.weight_scale"][n, g])
            assert value == pytest.approx(float(expected[n, k]), abs=1e-6)
    back = form.unpack(tensors, "x")
    for name in ("codes", "scales", "zeros", "bias"):
        assert torch.equal(getattr(back, name), getattr(linear, name)), name


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_library_decodes_what_is_packed(make_linear, scheme):
    linear = make_linear(K, N, resolved(scheme))
    packed = CompressedTensorsFormat(scheme).pack("x", linear)
    state = {name.removeprefix("x."): tensor for name, tensor in packed.items()}
    weight = PackedQuantizationCompressor.decompress(state, args_of(scheme))["weight"]
    assert torch.equal(weight, linear.dequantize().half())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_the_library_packs_is_decoded(scheme):
    generator = torch.Generator().manual_seed(0)
    groups, half = K // resolved(scheme).group, 2 ** (scheme.bits - 1)
    state = {
        "weight": torch.randn(N, K, generator=generator),
        "weight_scale": torch.rand(N, groups, generator=generator) / half + 0.01,
        "weight_zero_point": torch.zeros(N, groups, dtype=torch.int8),
    }
    if not scheme.symmetric:
        state["weight_zero_point"] = torch.randint(-half, half, (N, groups), generator=generator).to(
            torch.int8
        )
    packed = PackedQuantizationCompressor.compress(state, args_of(scheme))
    expected = PackedQuantizationCompressor.decompress(packed, args_of(scheme))["weight"]
    tensors = Tensors({f"x.{name}": tensor for name, tensor in packed.items()})
    linear = CompressedTensorsFormat(scheme).unpack(tensors, "x")
    torch.testing.assert_close(linear.dequantize(), expected, rtol=0, atol=0)


NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.10.mlp.down_proj", "model.layers.1.mlp.up_proj"]
MIXED = {
    "Linear": QuantScheme(4, 32, True),
    "re:.*down_proj": QuantScheme(8, 32, True),
    "re:.*mlp": QuantScheme(3, 32, False),
    "re:model.layers.1\\.": QuantScheme(6, -1, True),
    "model.layers.10.mlp.down_proj": QuantScheme(2, 32, False),
}


@pytest.mark.parametrize("name", [*NAMES, "model.layers.2.mlp.down_proj"])
def test_targets_are_found_as_the_library_finds_them(name):
    form = CompressedTensorsFormat(MIXED["Linear"], MIXED)
    first = match_targets(name, torch.nn.Linear(1, 1), MIXED)[0]
    assert form.scheme_of(name, 64) == resolved(MIXED[first])


def test_config_is_the_librarys_and_comes_back():
    form = CompressedTensorsFormat(MIXED["Linear"], MIXED, ("lm_head", "re:.*gate"))
    config = json.loads(json.dumps(form.quantization_config()))
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.format == "pack-quantized" and parsed.quantization_status == "compressed"
    found = {target: group.weights for group in parsed.config_groups.values() for target in group.targets}
    for target, scheme in MIXED.items():
        assert (found[target].num_bits, found[target].symmetric) == (scheme.bits, scheme.symmetric)
    assert found["re:model.layers.1\\."].strategy == "channel"
    assert find_format({"quantization_config": config}) == form
    plain = CompressedTensorsFormat(QuantScheme(4, -1, False))
    assert find_format({"quantization_config": plain.quantization_config()}) == plain


def test_a_scheme_for_each_linear():
    common, rare = QuantScheme(4, 32, True), QuantScheme(8, 32, True)
    form = CompressedTensorsFormat.mixed(dict.fromkeys(NAMES, common) | {NAMES[1]: rare})
    assert form.scheme == common
    assert [form.scheme_of(name, 64) for name in NAMES] == [common, rare, common]
    assert len(form.quantization_config()["config_groups"]) == 2
    assert CompressedTensorsFormat.mixed(dict.fromkeys(NAMES, common)) == CompressedTensorsFormat(common)


MODEL_TARGETS = {
    "Linear": QuantScheme(4, 32, True),
    "re:.*mlp.*": QuantScheme(8, -1, True),
    "model.layers.1.self_attn.q_proj": QuantScheme(3, 64, True),
}


def test_transformers_loads_a_mixed_checkpoint(tiny, quantized):
    """Config groups by class, pattern and name, and linears left dense."""
    from transformers import AutoModelForCausalLM

    form = CompressedTensorsFormat(MODEL_TARGETS["Linear"], MODEL_TARGETS, ("lm_head", "re:.*o_proj"))
    path, _ = quantized(tiny(attention_bias=True), form, keep=("o_proj",))
    ours = load_dense_model(open_checkpoint(path), torch.float16)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, logits = (model(ids).logits.float() for model in (theirs, ours))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_the_library_decodes_a_mixed_checkpoint(tiny, quantized):
    """Each module with the scheme the library itself gives it; asymmetric ones too."""
    from transformers import AutoModelForCausalLM

    targets = {**MODEL_TARGETS, "re:.*v_proj": QuantScheme(4, 32, False)}
    path, linears = quantized(tiny(), CompressedTensorsFormat(targets["Linear"], targets))
    checkpoint = open_checkpoint(path)
    model = AutoModelForCausalLM.from_config(checkpoint.hf_config())
    config = QuantizationConfig.model_validate(checkpoint.config["quantization_config"])
    apply_quantization_config(model, config)
    tensors = load_file(path / "model.safetensors")
    schemes = set()
    for name in linears:
        scheme = model.get_submodule(name).quantization_scheme
        schemes.add((scheme.weights.num_bits, scheme.weights.symmetric))
        state = {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(f"{name}.")}
        weight = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
        assert torch.equal(weight, checkpoint.linear(name).dequantize().half()), name
    assert schemes == {(4, True), (4, False), (8, True), (3, True)}


def config_of(**changes):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    weights = changes.pop("weights", {})
    group["weights"] |= weights
    group |= changes.pop("group", {})
    return {"quantization_config": {**quant, **changes}}


def test_defaults_are_the_librarys():
    form = find_format(config_of())
    args = QuantizationArgs(num_bits=4, type="int", group_size=32)
    assert form.scheme == QuantScheme(4, 32, args.symmetric) and args.strategy == "group"
    channel = QuantizationArgs(num_bits=4, group_size=-1)
    assert channel.strategy == "channel"
    assert find_format(config_of(weights={"group_size": -1})).scheme.group == -1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "nvfp4-pack-quantized"}, "g: format nvfp4-pack-quantized is not supported"),
        ({"group": {"format": "float-quantized"}}, "format float-quantized"),
        ({"group": {"input_activations": {"num_bits": 8}}}, "activations are quantized"),
        ({"weights": {"type": "float"}}, "float weights by group"),
        ({"weights": {"strategy": "block"}}, "int weights by block"),
        ({"weights": {"num_bits": 12}}, "12 bits; supported: 2 to 8"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        ({"transform_config": {"a": 1}}, "transform_config is not supported"),
        ({"config_groups": {}}, "without config_groups"),
        ({"group": {"targets": ["re:("]}}, r"target re:\(: not a pattern"),
        ({"config_groups": {"g": ["Linear"]}}, "malformed"),
    ],
)
def test_other_variants_are_refused_in_one_line(changes, words):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words) as error:
        find_format(config_of(**changes))
    assert "\n" not in str(error.value)


def test_damage_names_the_linear(make_linear):
    linear = make_linear(K, N, QuantScheme(4, 32, False))
    form = CompressedTensorsFormat(linear.scheme)
    tensors = form.pack("x", linear)
    with pytest.raises(CheckpointError, match=r"x: weight_packed \(24, 7\)"):
        form.unpack(Tensors(tensors | {"x.weight_packed": tensors["x.weight_packed"][:, :7]}), "x")
    order = (torch.arange(K) // 32).int()
    assert form.unpack(Tensors(tensors | {"x.weight_g_idx": order}), "x").scheme == linear.scheme
    assert form.unpack(Tensors(tensors | {"x.weight_g_idx": order * 0 - 1}), "x").scheme == linear.scheme
    for g_idx, kind in ((order.flip(0), "groups"), (order[torch.randperm(len(order))], "columns")):
        read = form.unpack(Tensors(tensors | {"x.weight_g_idx": g_idx}), "x")
        plain = form.unpack(Tensors(tensors), "x")
        expected = (plain.codes.float() - plain.zeros.float()[g_idx.long()]) * plain.scales.float()[
            g_idx.long()
        ]
        assert torch.equal(read.dequantize(), expected.T)
        assert (read.order is None) == (kind == "groups")
    with pytest.raises(CheckpointError, match="x: is packed, but no target"):
        CompressedTensorsFormat(linear.scheme, {"re:y": linear.scheme}).unpack(Tensors(tensors), "x")
    ragged = make_linear(48, N, QuantScheme(4, 32, False))
    with pytest.raises(CheckpointError, match="K divisible by the group, got K=48"):
        form.pack("x", ragged)


def test_checkpoint_has_the_formats_tensors(tiny, quantized):
    path, linears = quantized(tiny(), CompressedTensorsFormat(QuantScheme(4, 32, False)))
    tensors = load_file(Path(path) / "model.safetensors")
    assert all(f"{name}.weight_zero_point" in tensors for name in linears)
    checkpoint = open_checkpoint(path)
    for name, linear in linears.items():
        assert torch.equal(checkpoint.linear(name).dequantize(), linear.dequantize())
