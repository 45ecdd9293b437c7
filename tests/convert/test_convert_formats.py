"""AWQ and GPTQ against slow readers written from the formats' formulas, word by word and bit by bit."""

import logging

import pytest
import torch

from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.formats.bits import pack_bits, unpack_bits, words_for
from turbomill.convert.formats.compressed_tensors import CompressedTensorsFormat
from turbomill.convert.formats.dense import DenseFormat
from turbomill.convert.formats.find import find_format
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import DenseLinear, QuantScheme, all_finite
from turbomill.errors import CheckpointError, UnsupportedModelError


class Tensors(dict):
    """A TensorSource over a dict."""

    def has(self, name):
        return name in self

    def tensor(self, name):
        return self[name]


def unsigned(word):
    return int(word) & 0xFFFFFFFF


def slow_awq_code(words, row, column):
    """Column 8c + j is read by shifting word c by 4 * [0, 4, 1, 5, 2, 6, 3, 7][j]."""
    word = unsigned(words[row, column // 8])
    return word >> 4 * [0, 4, 1, 5, 2, 6, 3, 7][column % 8] & 15


def slow_stream_value(words, index, bits):
    """Value `index` of a stream of words, read bit by bit, low bits first."""
    value = 0
    for b in range(bits):
        position = index * bits + b
        value |= (unsigned(words[position // 32]) >> position % 32 & 1) << b
    return value


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_decodes_by_the_formula(make_linear, symmetric):
    linear = make_linear(64, 24, QuantScheme(4, 32, symmetric), bias=True)
    form = AwqFormat(linear.scheme)
    tensors = Tensors(form.pack("x", linear))
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        "x.qweight": (torch.int32, (64, 3)),
        "x.qzeros": (torch.int32, (2, 3)),
        "x.scales": (torch.float16, (2, 24)),
        "x.bias": (torch.float16, (24,)),
    }
    optional = {"x.bias"} | ({"x.qzeros"} if symmetric else set())
    assert form.expected("x", 64, 24) == {n: tuple(t.shape) for n, t in tensors.items() if n not in optional}
    for k in range(64):
        for n in range(24):
            code = slow_awq_code(tensors["x.qweight"], k, n)
            zero = slow_awq_code(tensors["x.qzeros"], k // 32, n)
            assert code == linear.codes[k, n]
            value = (code - zero) * float(tensors["x.scales"][k // 32, n])
            assert value == pytest.approx(float(linear.dequantize()[n, k]), abs=1e-7)
    back = form.unpack(tensors, "x")
    for name in ("codes", "scales", "zeros", "bias"):
        assert torch.equal(getattr(back, name), getattr(linear, name)), name
    assert back.scheme == linear.scheme


def test_awq_nibble_order_is_the_published_one():
    from turbomill.convert.formats.awq import pack_words

    word = unsigned(pack_words(torch.arange(8, dtype=torch.uint8)[None])[0, 0])
    # nibble i holds column [0, 2, 4, 6, 1, 3, 5, 7][i]
    assert [word >> 4 * i & 15 for i in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 10, 31, 32, 33, 96])
def test_bit_streams_match_a_bitwise_reader(bits, count):
    codes = torch.randint(0, 2**bits, (count, 3), dtype=torch.uint8)
    words = pack_bits(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (words_for(count, bits), 3)
    for column in range(3):
        read = [slow_stream_value(words[:, column], i, bits) for i in range(count)]
        assert read == codes[:, column].tolist()
    assert torch.equal(unpack_bits(words, bits, count), codes)


def test_three_bit_values_straddle_words():
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[10], codes[21] = 7, 7
    words = [unsigned(w) for w in pack_bits(codes, 3)]
    assert words == [0b11 << 30, 0b1 | 1 << 31, 0b11]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_decodes_by_the_formula(make_linear, version, bits, symmetric):
    linear = make_linear(64, 32, QuantScheme(bits, 32, symmetric))
    form = GptqFormat(linear.scheme, version)
    tensors = Tensors(form.pack("x", linear))
    assert {n: tuple(t.shape) for n, t in tensors.items() if n != "x.g_idx"} == form.expected("x", 64, 32)
    for k in range(0, 64, 3):
        for n in range(32):
            code = slow_stream_value(tensors["x.qweight"][:, n], k, bits)
            stored = slow_stream_value(tensors["x.qzeros"][k // 32], n, bits)
            zero = (stored + 1) % 2**bits if version == 1 else stored
            value = (code - zero) * float(tensors["x.scales"][int(tensors["x.g_idx"][k]), n])
            assert value == pytest.approx(float(linear.dequantize()[n, k]), abs=1e-6)
    back = form.unpack(tensors, "x")
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(back, name), getattr(linear, name)), name


def test_gptq_symmetric_zero_words():
    for version, word in ((1, 0x77777777), (2, 0x88888888)):
        form = GptqFormat(QuantScheme(4, 32, True), version)
        zeros = torch.full((1, 8), 8, dtype=torch.uint8)
        from turbomill.convert.linear import QuantLinear

        linear = QuantLinear(zeros.expand(32, 8).contiguous(), torch.ones(1, 8).half(), zeros, form.scheme)
        assert unsigned(form.pack("x", linear)["x.qzeros"][0, 0]) == word


def test_gptq_asymmetric_zero_of_nought_wraps_within_its_field(make_linear):
    linear = make_linear(32, 8, QuantScheme(4, 32, False))
    linear.zeros[:] = torch.tensor([0, 1, 0, 15, 8, 0, 2, 0], dtype=torch.uint8)
    form = GptqFormat(linear.scheme, 1)
    tensors = Tensors(form.pack("x", linear))
    stored = [slow_stream_value(tensors["x.qzeros"][0], n, 4) for n in range(8)]
    assert stored == [15, 0, 15, 14, 7, 15, 1, 15]
    assert torch.equal(form.unpack(tensors, "x").zeros, linear.zeros)


def test_gptq_ragged_last_group(make_linear):
    linear = make_linear(96, 32, QuantScheme(4, 64, False))
    form = GptqFormat(linear.scheme)
    assert linear.scales.shape == (2, 32)
    back = form.unpack(Tensors(form.pack("x", linear)), "x")
    assert torch.equal(back.dequantize(), linear.dequantize())


def test_gptq_file_that_says_v1_and_holds_v2_zeros(make_linear, caplog):
    linear = make_linear(64, 32, QuantScheme(4, 32, True))
    tensors = Tensors(GptqFormat(linear.scheme, 2).pack("x", linear))
    with caplog.at_level(logging.WARNING, "turbomill.convert"):
        logging.getLogger("turbomill").propagate = True
        back = GptqFormat(linear.scheme, 1).unpack(tensors, "x")
    assert torch.equal(back.dequantize(), linear.dequantize())
    assert "says GPTQ v1, the zeros are v2" in caplog.text


def test_gptq_symmetric_file_with_other_zeros_is_an_error(make_linear):
    linear = make_linear(64, 32, QuantScheme(4, 32, False))
    tensors = Tensors(GptqFormat(linear.scheme, 1).pack("x", linear))
    with pytest.raises(CheckpointError, match=r"x\.qzeros: the config says sym"):
        GptqFormat(QuantScheme(4, 32, True), 1).unpack(tensors, "x")


def test_gptq_group_order(make_linear):
    linear = make_linear(64, 32, QuantScheme(4, 32, False))
    form = GptqFormat(linear.scheme)
    tensors = Tensors(form.pack("x", linear))
    renamed = Tensors({**tensors, "x.g_idx": 1 - tensors["x.g_idx"]})  # blocks whole, groups swapped
    assert torch.equal(form.unpack(renamed, "x").scales, linear.scales.flip(0))
    for g_idx, error, words in (
        (torch.arange(64) // 16, CheckpointError, "names groups beyond the 2"),
        (torch.arange(64) // 32 * 0, UnsupportedModelError, "groups of other sizes than 32"),
        (-tensors["x.g_idx"], CheckpointError, "names groups beyond"),
    ):
        with pytest.raises(error, match=rf"x\.g_idx: {words}"):
            form.unpack(Tensors({**tensors, "x.g_idx": g_idx.int()}), "x")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("bits", "k", "group"), [(2, 64, 32), (3, 96, 32), (4, 96, 64), (8, 64, 16)])
def test_gptq_desc_act(make_linear, bits, k, group, version):
    """Rows in any order, each with its group's scale, a ragged last group among them; and written again."""
    linear = make_linear(k, 32, QuantScheme(bits, group, False))
    form = GptqFormat(linear.scheme, version)
    tensors = Tensors(form.pack("x", linear))
    tensors["x.g_idx"] = tensors["x.g_idx"][torch.randperm(k)].contiguous()
    expected = torch.empty(32, k)
    for row in range(k):
        g = int(tensors["x.g_idx"][row])
        for n in range(32):
            code = slow_stream_value(tensors["x.qweight"][:, n], row, bits)
            zero = slow_stream_value(tensors["x.qzeros"][g], n, bits)
            zero = (zero + 1) % 2**bits if version == 1 else zero
            expected[n, row] = (code - zero) * tensors["x.scales"][g, n].float()
    back = form.unpack(tensors, "x")
    assert torch.equal(back.dequantize(), expected)
    assert torch.equal(back.order, form.order(tensors, "x")) and back.order.dtype == torch.int32
    assert torch.equal(tensors["x.g_idx"][back.order.long()], (torch.arange(k) // group).int())
    again = form.pack("x", back)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    for other in (AwqFormat(QuantScheme(4, 32, False)), CompressedTensorsFormat(linear.scheme)):
        with pytest.raises(CheckpointError, match=r"inputs in another order|4-bit linears only"):
            other.pack("x", back)


def test_awq_without_qzeros(make_linear):
    linear = make_linear(64, 24, QuantScheme(4, 32, True))
    tensors = Tensors(AwqFormat(linear.scheme).pack("x", linear))
    del tensors["x.qzeros"]
    form = find_format(
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}}
    )
    assert "x.qzeros" not in form.expected("x", 64, 24)
    assert torch.equal(form.unpack(tensors, "x").dequantize(), linear.dequantize())
    with pytest.raises(CheckpointError, match=r"x\.qzeros: missing"):
        AwqFormat(QuantScheme(4, 32, False)).unpack(tensors, "x")


def test_minima_have_no_place_in_other_formats(make_linear):
    plain = make_linear(64, 32, QuantScheme(4, 32, True))
    linear = plain.grid.with_mins().with_codes(plain.codes)
    assert torch.equal(linear.dequantize(), plain.dequantize()) and not linear.zeros.any()
    linear.validate("x")
    for form in (AwqFormat(plain.scheme), GptqFormat(plain.scheme), CompressedTensorsFormat(plain.scheme)):
        with pytest.raises(CheckpointError, match=r"x: .* has no room for a group's minimum"):
            form.pack("x", linear)
    assert torch.equal(DenseFormat().pack("x", linear)["x.weight"], plain.dequantize().half())


def test_gptq_dynamic_overrides():
    config = {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
            "dynamic": {
                r"-:.*gate.*": {},
                r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
                r".*\.0\..*": {"sym": False},
            },
        }
    }
    form = find_format(config)
    assert form.scheme_of("model.layers.0.mlp.down_proj", 256) == QuantScheme(8, 32, True)
    assert form.scheme_of("model.layers.0.mlp.up_proj", 256) == QuantScheme(4, 128, False)
    assert form.scheme_of("model.layers.1.mlp.up_proj", 256) == QuantScheme(4, 128, True)


@pytest.mark.parametrize(
    "quant, form, scheme",
    [
        (None, DenseFormat, None),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
            AwqFormat,
            QuantScheme(4, 64, False),
        ),
        (
            {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
            AwqFormat,
            QuantScheme(4, 128, False),
        ),
        (
            {"bits": 3, "group_size": -1, "desc_act": False, "sym": False},
            GptqFormat,
            QuantScheme(3, -1, False),
        ),
    ],
)
def test_formats_are_recognised(quant, form, scheme):
    found = find_format({"quantization_config": quant})
    assert type(found) is form and found.scheme == scheme


@pytest.mark.parametrize(
    "quant, words",
    [
        (
            {"quant_method": "bitsandbytes"},
            "bitsandbytes is not supported; supported: dense, awq, gptq, compressed-tensors",
        ),
        ({"quant_method": "awq", "version": "marlin"}, "AWQ version marlin"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "awq", "bits": 8}, "4-bit"),
    ],
)
def test_other_formats_are_refused(quant, words):
    with pytest.raises(UnsupportedModelError, match=words):
        find_format({"quantization_config": quant})


@pytest.mark.parametrize(
    "form", [AwqFormat(QuantScheme(4, 128, False)), AwqFormat(QuantScheme(4, 48, False))]
)
def test_awq_group_must_divide(make_linear, form):
    linear = make_linear(64, 32, QuantScheme(4, form.scheme.group, False))
    with pytest.raises(CheckpointError, match=r"x: AWQ gemm needs K divisible.*K=64"):
        form.pack("x", linear)


def test_scales_beyond_fp16_are_refused(make_linear):
    linear = make_linear(64, 32, QuantScheme(4, 32, False), dtype=torch.float32)
    linear.scales[0, 0] = 1e6
    for form in (AwqFormat(linear.scheme), GptqFormat(linear.scheme)):
        with pytest.raises(CheckpointError, match="fp16"):
            form.pack("x", linear)


def test_dense_format_writes_dequantized(make_linear):
    linear = make_linear(64, 32, QuantScheme(4, 32, False), bias=True)
    tensors = Tensors(DenseFormat().pack("x", linear))
    back = DenseFormat().unpack(tensors, "x")
    assert isinstance(back, DenseLinear) and back.shape == (64, 32)
    assert torch.equal(back.weight, linear.dequantize().half()) and torch.equal(back.bias, linear.bias)


def test_linear_validation(make_linear):
    from dataclasses import replace

    linear = make_linear(64, 32, QuantScheme(4, 32, False))
    linear.validate("x")
    for change, words in (
        ({"codes": linear.codes.clone().fill_(16)}, "does not fit in 4 bits"),
        ({"scales": linear.scales[:1]}, "scales have shape"),
        ({"scales": linear.scales * float("inf")}, "inf or NaN"),
        ({"scheme": QuantScheme(4, 32, True)}, "symmetric"),
        ({"zeros": linear.zeros.int()}, "uint8"),
    ):
        with pytest.raises(CheckpointError, match=words):
            replace(linear, **change).validate("x")


def test_malformed_quantization_config():
    with pytest.raises(CheckpointError, match="quantization_config is malformed"):
        find_format({"quantization_config": {"quant_method": "gptq", "bits": "four"}})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_is_told_from_a_sum(dtype):
    largest = torch.full((64, 512), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(largest) and all_finite(-largest) and all_finite(torch.zeros(0, dtype=dtype))
    for bad in (float("inf"), -float("inf"), float("nan")):
        values = largest.clone()
        values[3, 7] = bad
        assert not all_finite(values)
        values[5, 9] = -bad
        assert not all_finite(values)
