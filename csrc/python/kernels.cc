// Single kernels on numpy arrays, so that tests can hold each against a reference.
#include "kernels/cpu/kernels.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/thread_pool.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/kv_cache.h"
#include "kernels/cpu/linear.h"
#include "kernels/sampling.h"
#include "python/edit_fields.h"
#include "python/register.h"
#include "store/expand.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Bits16 = py::array_t<uint16_t, py::array::c_style>;

void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

Floats run_linear(const Linear& w, const Floats& x, const std::string& isa, int threads,
                  int activation_bits = 32) {
    require(x.ndim() == 2 && x.shape(1) == w.k, "x must be [M, K]");
    ThreadPool pool(threads);
    cpu::LinearRunner linear(cpu::kernels(isa.c_str()), pool, activation_bits);
    Floats y({x.shape(0), py::ssize_t(w.n)});
    linear(w, x.data(), int(x.shape(0)), y.mutable_data());
    return y;
}

Floats dense_linear(const Floats& x, const py::array& w, const std::string& dtype,
                    const std::vector<float>& bias, const std::string& isa, int threads) {
    Linear linear;
    linear.n = int(w.shape(0));
    linear.k = int(w.shape(1));
    linear.dtype = parse_dtype(dtype);
    require(size_t(w.itemsize()) == dtype_bytes(linear.dtype), "w's item size does not fit its dtype");
    linear.dense = w.data();
    linear.bias = bias;
    return run_linear(linear, x, isa, threads);
}

Linear packed_of(const Bytes& codes, const Bits16& scales, const std::optional<Bits16>& zeros, int n, int k,
                 const std::string& dtype, const std::optional<Bits16>& mins, const std::vector<int>& order) {
    require((codes.ndim() == 5 || codes.ndim() == 6) && scales.ndim() == 3,
            "codes must be [N/64, K/64, 4, 32, 16] or [N/64, K/64, 4, 8, 2, 64], scales [N/64, G, 64]");
    Linear linear;
    linear.n = n;
    linear.k = k;
    linear.codes = codes.data();
    linear.bits = codes.ndim() == 5 ? 4 : 8;
    linear.scales = scales.data();
    linear.zeros = zeros ? zeros->data() : nullptr;
    linear.mins = mins ? mins->data() : nullptr;
    linear.order = order;
    linear.dtype = parse_dtype(dtype);
    linear.k_tiles = int(codes.shape(1));
    linear.groups = int(scales.shape(1));
    linear.group = linear.k_tiles * 64 / linear.groups;
    return linear;
}

Floats packed_linear(const Floats& x, const Bytes& codes, const Bits16& scales,
                     const std::optional<Bits16>& zeros, int n, int k, const std::string& dtype,
                     const std::string& isa, int threads, const std::optional<Bits16>& mins,
                     const std::vector<int>& order, int activation_bits) {
    return run_linear(packed_of(codes, scales, zeros, n, k, dtype, mins, order), x, isa, threads,
                      activation_bits);
}

// The weight [N, K] that codes and what is beside them stand for.
Floats packed_expand(const Bytes& codes, const Bits16& scales, const std::optional<Bits16>& zeros, int n,
                     int k, const std::string& dtype, const std::optional<Bits16>& mins,
                     const std::vector<int>& order) {
    const std::vector<float> values = expand(packed_of(codes, scales, zeros, n, k, dtype, mins, order));
    Floats out({n, k});
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
}

Floats rms_norm(const Floats& x, const Floats& w, float eps, const std::string& isa) {
    const py::ssize_t h = x.shape(1);
    Floats y({x.shape(0), h});
    for (py::ssize_t row = 0; row < x.shape(0); ++row)
        cpu::kernels(isa.c_str())
            .rms_norm(x.data() + row * h, w.data(), y.mutable_data() + row * h, int(h), eps);
    return y;
}

Floats rope(const Floats& x, const Floats& cos, const Floats& sin, const std::string& isa) {
    Floats y({x.shape(0), x.shape(1)});
    std::copy_n(x.data(), x.size(), y.mutable_data());
    for (py::ssize_t row = 0; row < x.shape(0); ++row)
        cpu::kernels(isa.c_str())
            .rope(y.mutable_data() + row * x.shape(1), cos.data() + row * cos.shape(1),
                  sin.data() + row * sin.shape(1), int(cos.shape(1)));
    return y;
}

Floats silu_gate(const Floats& gate_up, const std::string& isa) {
    const py::ssize_t inter = gate_up.shape(1) / 2;
    Floats y({gate_up.shape(0), inter});
    for (py::ssize_t row = 0; row < gate_up.shape(0); ++row)
        cpu::kernels(isa.c_str())
            .silu_gate(gate_up.data() + row * 2 * inter, y.mutable_data() + row * inter, int(inter));
    return y;
}

Floats gelu_gate(const Floats& gate_up, const std::string& isa) {
    const py::ssize_t inter = gate_up.shape(1) / 2;
    Floats y({gate_up.shape(0), inter});
    for (py::ssize_t row = 0; row < gate_up.shape(0); ++row)
        cpu::kernels(isa.c_str())
            .gelu_gate(gate_up.data() + row * 2 * inter, y.mutable_data() + row * inter, int(inter));
    return y;
}

Floats softcap(const Floats& x, float scale, float cap, const std::string& isa) {
    Floats y({x.size()});
    std::copy_n(x.data(), x.size(), y.mutable_data());
    cpu::kernels(isa.c_str()).softcap(y.mutable_data(), x.size(), scale, cap);
    return y;
}

// Quantizes rows of one token and head each, and reads them back: (codes, params, values).
py::tuple kv_roundtrip(const Floats& x, int quant_policy, const std::string& isa) {
    const KvFormat format = kv_formats(quant_policy).value;
    const py::ssize_t rows = x.shape(0), d = x.shape(1), bytes = d * code_bits(format) / 8;
    Bytes codes({rows, bytes});
    Bits16 params({rows, py::ssize_t(2)});
    Floats y({rows, d});
    const auto& k = cpu::kernels(isa.c_str());
    for (py::ssize_t r = 0; r < rows; ++r) {
        k.kv_quantize(format, x.data() + r * d, int(d), codes.mutable_data() + r * bytes,
                      params.mutable_data() + 2 * r);
        k.kv_dequantize(format, codes.data() + r * bytes, params.data() + 2 * r, int(d),
                        y.mutable_data() + r * d);
    }
    return py::make_tuple(codes, params, y);
}

// Rows x [n, D], rotated as the cache rotates heads.
Floats hadamard(const Floats& x, const std::string& isa) {
    const py::ssize_t rows = x.shape(0), d = x.shape(1);
    Floats y({rows, d});
    std::copy_n(x.data(), x.size(), y.mutable_data());
    for (py::ssize_t r = 0; r < rows; ++r)
        cpu::kernels(isa.c_str()).hadamard(y.mutable_data() + r * d, int(d), rotation_block(int(d)));
    return y;
}

// Causal attention of the last rows of qkv [T, (Nq + 2 Nkv) D] over all T keys and values, through a paged
// cache whose blocks are handed out in reverse. Queries of the first `context` rows are not computed.
Floats attention(const Floats& qkv, int num_heads, int num_kv_heads, int head_dim, int context, int block_len,
                 int quant_policy, const std::string& cache_dtype, const std::string& isa, int threads,
                 int window, float softcap, float scale, bool rotation) {
    ModelConfig model;
    model.layer_windows = {window};
    model.attention_softcap = softcap;
    model.attention_scale = scale;
    model.num_layers = 1;
    model.num_heads = num_heads;
    model.num_kv_heads = num_kv_heads;
    model.head_dim = head_dim;
    require(qkv.ndim() == 2 && qkv.shape(1) == model.qkv_dim(), "qkv must be [T, (Nq + 2 Nkv) D]");
    const int tokens = int(qkv.shape(0));
    EngineConfig config;
    config.block_len = block_len;
    config.cache_block_count = (tokens + block_len - 1) / block_len;
    config.quant_policy = quant_policy;
    config.cache_dtype = cache_dtype;
    config.kv_rotation = rotation;
    const auto& k = cpu::kernels(isa.c_str());
    cpu::KvCache cache(model, config);
    BatchData batch;
    Slice slice;
    slice.context = context;
    slice.length = tokens - context;
    for (int b = config.cache_block_count - 1; b >= 0; --b) slice.blocks.push_back(b);
    for (int t = 0; t < tokens; ++t) {
        for (int value = 0; value < 2; ++value) {
            for (int head = 0; head < num_kv_heads; ++head) {
                const float* source = qkv.data() + int64_t(t) * model.qkv_dim() +
                                      (num_heads + value * num_kv_heads + head) * head_dim;
                std::vector<float> row(source, source + head_dim);
                if (rotation) k.hadamard(row.data(), head_dim, rotation_block(head_dim));
                cache.write(k, slice.blocks[t / block_len], 0, value, head, t % block_len, row.data());
            }
        }
    }
    Floats out({py::ssize_t(slice.length), py::ssize_t(model.q_dim())});
    batch.slices.push_back(std::move(slice));
    ThreadPool pool(threads);
    cpu::Attention run(model, k, cache, pool, false);
    run(0, batch, {0}, qkv.data() + int64_t(context) * model.qkv_dim(), out.mutable_data());
    return out;
}

int sample(const Floats& logits, float temperature, int top_k, float top_p, uint64_t seed, uint64_t position,
           float min_p) {
    const SamplingParams params{temperature, top_k, top_p, seed, min_p};
    const auto result = Sampler().sample(logits.data(), int(logits.size()), params, position);
    if (!result.finite) throw std::invalid_argument("the logits are not finite");
    return result.token;
}

Floats edit_logits_row(const Floats& logits, float repetition, float presence, float frequency,
                       const std::vector<EditFields>& edits, const std::vector<std::pair<int, int>>& bans,
                       const std::vector<int>& allowed, int last, bool last_unknown) {
    Floats out({logits.size()});
    std::copy_n(logits.data(), logits.size(), out.mutable_data());
    const LogitEdits rules =
        logit_edits(repetition, presence, frequency, edits, bans, allowed, last_unknown, int(logits.size()));
    edit_logits(rules, last, int(logits.size()), out.mutable_data());
    return out;
}

// (logprob of the token, [(id, logprob) of the likeliest])
py::tuple logprobs_row(const Floats& logits, int token, int count) {
    require(count <= kMostLogprobs, "count is too large");
    const Logprobs l = logprobs_of(logits.data(), int(logits.size()), token, count);
    std::vector<std::pair<int, float>> top;
    for (int i = 0; i < l.count; ++i) top.emplace_back(l.ids[i], l.values[i]);
    return py::make_tuple(l.logprob, top);
}

}  // namespace

void register_kernels(py::module_& parent) {
    py::module_ m =
        parent.def_submodule("kernels", "Single CPU kernels on numpy arrays, for tests and benchmarks.");
    m.def("dense_linear", &dense_linear, py::arg("x"), py::arg("w"), py::arg("dtype"),
          py::arg("bias") = std::vector<float>(), py::arg("isa") = "", py::arg("threads") = 1);
    m.def("packed_linear", &packed_linear, py::arg("x"), py::arg("codes"), py::arg("scales"),
          py::arg("zeros"), py::arg("n"), py::arg("k"), py::arg("dtype") = "float16", py::arg("isa") = "",
          py::arg("threads") = 1, py::arg("mins") = std::nullopt, py::arg("order") = std::vector<int>(),
          py::arg("activation_bits") = 32);
    m.def("packed_expand", &packed_expand, py::arg("codes"), py::arg("scales"), py::arg("zeros"),
          py::arg("n"), py::arg("k"), py::arg("dtype") = "float16", py::arg("mins") = std::nullopt,
          py::arg("order") = std::vector<int>());
    m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("w"), py::arg("eps"), py::arg("isa") = "");
    m.def("rope", &rope, py::arg("x"), py::arg("cos"), py::arg("sin"), py::arg("isa") = "");
    m.def("silu_gate", &silu_gate, py::arg("gate_up"), py::arg("isa") = "");
    m.def("kv_roundtrip", &kv_roundtrip, py::arg("x"), py::arg("quant_policy"), py::arg("isa") = "");
    m.def("hadamard", &hadamard, py::arg("x"), py::arg("isa") = "");
    m.def("attention", &attention, py::arg("qkv"), py::arg("num_heads"), py::arg("num_kv_heads"),
          py::arg("head_dim"), py::arg("context"), py::arg("block_len") = 64, py::arg("quant_policy") = 0,
          py::arg("cache_dtype") = "float32", py::arg("isa") = "", py::arg("threads") = 1,
          py::arg("window") = 0, py::arg("softcap") = 0.f, py::arg("scale") = 0.f,
          py::arg("rotation") = false);
    m.def("gelu_gate", &gelu_gate, py::arg("gate_up"), py::arg("isa") = "");
    m.def("softcap", &softcap, py::arg("x"), py::arg("scale"), py::arg("cap"), py::arg("isa") = "");
    m.def("sample", &sample, py::arg("logits"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
          py::arg("seed"), py::arg("position"), py::arg("min_p") = 0.f);
    m.def("edit_logits", &edit_logits_row, py::arg("logits"), py::arg("repetition") = 1.f,
          py::arg("presence") = 0.f, py::arg("frequency") = 0.f, py::arg("edits") = std::vector<EditFields>(),
          py::arg("bans") = std::vector<std::pair<int, int>>(), py::arg("allowed") = std::vector<int>(),
          py::arg("last") = -1, py::arg("last_unknown") = false);
    m.def("logprobs", &logprobs_row, py::arg("logits"), py::arg("token"), py::arg("count"));
}

}  // namespace turbomill::python
