// Single GPU kernels on numpy arrays, so that tests can hold each against a reference, and the benchmarks'
// timers. Values pass as fp32; each call rounds its inputs to `dtype`, copies them to the current GPU,
// poisons the outputs, runs, and copies back.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/edits.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/tiles.h"
#include "kernels/sampling.h"
#include "python/cuda_array.h"
#include "python/edit_fields.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using cuda::check;

void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

Floats rms_norm(const Floats& x, const std::optional<Floats>& delta, const Floats& w, float eps,
                const std::string& dtype) {
    const DType type = parse_dtype(dtype);
    const int rows = int(x.shape(0)), h = int(x.shape(1));
    const DeviceArray residual(x, DType::F32), weight(w, DType::F32), y(type, size_t(rows) * h);
    const std::optional<DeviceArray> added =
        delta ? std::make_optional<DeviceArray>(*delta, type) : std::nullopt;
    cuda::rms_norm(type,
                   {residual.as<float>(), added ? added->as<void>() : nullptr, nullptr, true,
                    weight.as<float>(), y.as<void>(), rows, h, eps},
                   nullptr);
    if (delta) {  // the residual too, below the result
        Floats both({py::ssize_t(2), py::ssize_t(rows), py::ssize_t(h)});
        y.read(both.mutable_data());
        residual.read(both.mutable_data() + size_t(rows) * h);
        return both;
    }
    return y.array({rows, h});
}

Floats silu_gate(const Floats& gate_up, const std::string& dtype) {
    const DType type = parse_dtype(dtype);
    const int rows = int(gate_up.shape(0)), inter = int(gate_up.shape(1)) / 2;
    const DeviceArray x(gate_up, type), y(type, size_t(rows) * inter);
    cuda::silu_gate(type, x.as<void>(), y.as<void>(), rows, inter, nullptr);
    return y.array({rows, inter});
}

Floats dense_linear(const Floats& x, const Floats& w, const Floats& bias, const std::string& dtype,
                    const std::string& out_dtype) {
    const DType type = parse_dtype(dtype), out = parse_dtype(out_dtype);
    const int rows = int(x.shape(0)), n = int(w.shape(0)), k = int(w.shape(1));
    const DeviceArray input(x, type), weight(w, type), biases(bias, DType::F32), y(out, size_t(rows) * n);
    cuda::DeviceLinear linear;
    linear.n = n;
    linear.k = k;
    linear.dense = weight.as<void>();
    linear.bias = bias.size() ? biases.as<float>() : nullptr;
    cuda::LinearRunner(type, 0, nullptr)(linear, input.as<void>(), rows, y.as<void>(), out);
    return y.array({rows, n});
}

// `way`: "in_place", "as_dense", "fused" or "gated" with `plan`, or "" for the one that the engine takes.
Floats w4_linear(const Floats& x, const Bytes& codes, const Bits16& scales,
                 const std::optional<Bits16>& zeros, int n, int k, const Floats& bias,
                 const std::string& dtype, const std::string& scale_dtype, const std::string& out_dtype,
                 const std::string& way, const std::optional<PlanTuple>& plan) {
    const DType type = parse_dtype(dtype), out = parse_dtype(out_dtype);
    require(codes.ndim() == 5 && scales.ndim() == 3,
            "codes must be [N/64, K/64, 4, 32, 16], scales [N/64, G, 64]");
    require(x.ndim() == 2 && x.shape(1) == k, "x must be [M, K]");
    const int columns = way == "gated" ? n / 2 : n;
    const int rows = int(x.shape(0)), k_tiles = int(codes.shape(1)), groups = int(scales.shape(1));
    const DeviceArray input(x, type), code_bytes(codes.data(), codes.nbytes()),
        scale_bytes(scales.data(), scales.nbytes()), biases(bias, DType::F32), y(out, size_t(rows) * columns);
    const std::optional<DeviceArray> zero_bytes =
        zeros ? std::make_optional<DeviceArray>(zeros->data(), zeros->nbytes()) : std::nullopt;
    cuda::DeviceLinear linear;
    linear.n = n;
    linear.k = k;
    linear.bias = bias.size() ? biases.as<float>() : nullptr;
    linear.w4 = {code_bytes.as<uint8_t>(),
                 scale_bytes.as<void>(),
                 zero_bytes ? zero_bytes->as<void>() : nullptr,
                 parse_dtype(scale_dtype) == DType::BF16,
                 n,
                 k,
                 k_tiles,
                 groups,
                 k_tiles * 64 / groups};
    cuda::LinearRunner run(type, size_t(n) * k, nullptr);
    if (way == "in_place") {
        run.w4_in_place(linear, input.as<void>(), rows, y.as<void>(), out);
    } else if (way == "as_dense") {
        run.w4_as_dense(linear, input.as<void>(), rows, y.as<void>(), out);
    } else if (way == "gated") {
        require(plan.has_value(), "the fused kernels need a plan");
        cuda::w4_fused(type, out, linear.w4, input.as<void>(), linear.bias, y.as<void>(), rows,
                       plan_of(*plan), 132, false, nullptr, true);
    } else if (way == "fused") {
        require(plan && cuda::w4_fused_fits(type, linear.w4, input.as<void>()),
                "the fused kernels do not fit here, or there is no plan");
        run.w4_fused(linear, input.as<void>(), rows, y.as<void>(), out, plan_of(*plan));
    } else {
        run(linear, input.as<void>(), rows, y.as<void>(), out);
    }
    return y.array({rows, columns});
}

// `count` products one after the other, each with the result of the last: x, then W x, W W x, ... of a square
// W. By the plan for overlapping launches either way: another one may add in another order.
Floats w4_chain(const Floats& x, const Bytes& codes, const Bits16& scales, int count,
                const std::string& dtype, bool overlap) {
    const DType type = parse_dtype(dtype);
    const int rows = int(x.shape(0)), k = int(x.shape(1)), groups = int(scales.shape(1));
    const DeviceArray first(x, type), second(type, size_t(rows) * k),
        code_bytes(codes.data(), codes.nbytes()), scale_bytes(scales.data(), scales.nbytes());
    cuda::DeviceLinear linear;
    linear.n = linear.k = k;
    linear.w4 = {code_bytes.as<uint8_t>(),
                 scale_bytes.as<void>(),
                 nullptr,
                 type == DType::BF16,
                 k,
                 k,
                 k / 64,
                 groups,
                 k / groups};
    cuda::LinearRunner run(type, size_t(k) * k, nullptr);
    run.set_overlap(overlap);
    int device = 0, multiprocessors = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "chain");
    const cuda::W4Plan plan = cuda::choose_w4_plan(k, k, rows, multiprocessors, true);
    for (int i = 0; i < count; ++i)
        run.w4_fused(linear, (i % 2 ? second : first).as<void>(), rows, (i % 2 ? first : second).as<void>(),
                     type, plan);
    return (count % 2 ? second : first).array({rows, k});
}

// Causal attention through the paged cache of a one-layer backend, whose blocks are handed out in reverse, to
// several sequences in turn. rope_and_cache writes it, with the rotation of `inv_freq`.
class AttentionCase {
  public:
    AttentionCase(int num_heads, int num_kv_heads, int head_dim, int tokens, int sequences, int block_len,
                  int quant_policy, const std::string& cache_dtype, const std::string& dtype,
                  std::vector<float> inv_freq)
        : type_(parse_dtype(dtype)) {
        model_.num_layers = 1;
        model_.hidden_size = 64;
        model_.vocab_size = 1;
        model_.num_heads = num_heads;
        model_.num_kv_heads = num_kv_heads;
        model_.head_dim = head_dim;
        model_.intermediate_size = 8;
        config_.device = "cuda";
        config_.session_len = ceil_div(tokens, block_len) * block_len;
        config_.max_prefill_token_num = config_.session_len * sequences;
        config_.max_batch_size = sequences + 7;  // so that steps of decodes are padded
        config_.block_len = block_len;
        config_.cache_block_count = sequences * ceil_div(tokens, block_len);
        config_.quant_policy = quant_policy;
        config_.cache_dtype = cache_dtype;
        embedding_.assign(64 * 4, 0);
        weights_.embedding.n = 1;
        weights_.embedding.k = 64;
        weights_.embedding.dtype = type_;
        weights_.embedding.dense = embedding_.data();
        weights_.output = weights_.embedding;
        backend_.emplace(model_, config_, weights_, inv_freq);
        poison_cache();
    }

    // Attention outputs of rows [context, T) of qkv [T, (Nq + 2 Nkv) D], which come in chunks of at most
    // `chunk` rows.
    Floats run(const Floats& qkv, int context, int chunk) {
        const int tokens = rows_of(qkv), out_width = model_.q_dim();
        Floats result({py::ssize_t(tokens - context), py::ssize_t(out_width)});
        int done = 0;
        while (done < tokens) {
            const int end = std::min(tokens, done < context ? context : done + chunk);
            const std::vector<float> out = step({&qkv}, {done}, {end});
            if (done >= context)
                std::copy(out.begin(), out.end(), result.mutable_data() + size_t(done - context) * out_width);
            done = end;
        }
        return result;
    }

    // Outputs of the last lengths[i] rows of each sequence, one below the other, computed in one step.
    Floats run_batch(const std::vector<Floats>& qkvs, const std::vector<int>& lengths) {
        std::vector<const Floats*> all;
        std::vector<int> contexts, ends;
        py::ssize_t rows = 0;
        for (size_t i = 0; i < qkvs.size(); ++i) {
            all.push_back(&qkvs[i]);
            ends.push_back(rows_of(qkvs[i]));
            contexts.push_back(ends.back() - lengths[i]);
            rows += lengths[i];
        }
        step(all, std::vector<int>(qkvs.size(), 0), contexts);
        Floats result({rows, py::ssize_t(model_.q_dim())});
        const std::vector<float> out = step(all, contexts, ends);
        std::copy(out.begin(), out.end(), result.mutable_data());
        return result;
    }

  private:
    int rows_of(const Floats& qkv) const {
        require(qkv.ndim() == 2 && qkv.shape(1) == model_.qkv_dim(), "qkv must be [T, (Nq + 2 Nkv) D]");
        return int(qkv.shape(0));
    }

    // What is left of other sequences in blocks must not matter: here, NaN.
    void poison_cache() {
        BatchData batch;
        const int blocks = config_.session_len / config_.block_len;
        for (int first = 0; first < config_.cache_block_count; first += blocks) {
            Slice slice;
            slice.length = config_.session_len;
            slice.tokens.assign(slice.length, 0);
            for (int b = 0; b < blocks; ++b) slice.blocks.push_back(first + b);
            batch.slices.push_back(std::move(slice));
        }
        const auto x = backend_->allocate(batch.tokens(), model_.qkv_dim());
        check(cudaMemset(x->data(), 0xff, size_t(batch.tokens()) * model_.qkv_dim() * dtype_bytes(type_)),
              "poison");
        check(cudaDeviceSynchronize(), "poison");
        backend_->begin_step(batch);
        backend_->rope_and_cache(0, *x);
        backend_->synchronize();
    }

    // Runs rows [begins[i], ends[i]) of each sequence.
    std::vector<float> step(const std::vector<const Floats*>& qkvs, const std::vector<int>& begins,
                            const std::vector<int>& ends) {
        const int width = model_.qkv_dim(), out_width = model_.q_dim(), sequences = int(qkvs.size());
        // As in an engine's step of decodes alone, which is padded and rotated by attention itself.
        bool decodes = true;
        for (int i = 0; i < sequences; ++i) decodes = decodes && ends[i] - begins[i] == 1;
        BatchData batch;
        std::vector<float> inputs;
        for (int i = 0; i < sequences; ++i) {
            Slice slice;
            slice.context = begins[i];
            slice.length = ends[i] - begins[i];
            if (slice.length == 0) continue;
            slice.tokens.assign(slice.length, 0);
            slice.sample = decodes;
            for (int b = 0; b < ceil_div(ends[i], config_.block_len); ++b)
                slice.blocks.push_back(config_.cache_block_count - 1 - (b * sequences + i));
            batch.slices.push_back(std::move(slice));
            inputs.insert(inputs.end(), qkvs[i]->data() + size_t(begins[i]) * width,
                          qkvs[i]->data() + size_t(ends[i]) * width);
        }
        const int count = batch.tokens();
        std::vector<float> outputs(size_t(count) * out_width);
        if (count == 0) return outputs;
        constexpr int kMostPadding = 16;
        const auto x = backend_->allocate(count + kMostPadding, width),
                   y = backend_->allocate(count + kMostPadding, out_width);
        backend_->begin_step(batch);
        const DeviceArray rows(inputs.data(), inputs.size(), type_);
        copy(x->data(), rows.as<void>(), inputs.size());
        check(cudaMemset(y->data(), 0xff, outputs.size() * dtype_bytes(type_)), "poison");
        check(cudaDeviceSynchronize(), "poison");
        backend_->rope_and_cache(0, *x);
        backend_->attention(0, *x, *y);
        backend_->synchronize();
        const DeviceArray out(type_, outputs.size());
        copy(out.as<void>(), y->data(), outputs.size());
        out.read(outputs.data());
        return outputs;
    }

    void copy(void* to, const void* from, size_t elements) const {
        check(cudaMemcpy(to, from, elements * dtype_bytes(type_), cudaMemcpyDeviceToDevice), "copy");
    }

    DType type_;
    ModelConfig model_;
    EngineConfig config_;
    Weights weights_;
    std::vector<uint8_t> embedding_;
    std::optional<cuda::CudaBackend> backend_;
};

Floats attention(const Floats& qkv, int num_heads, int num_kv_heads, int head_dim, int context, int block_len,
                 int quant_policy, const std::string& cache_dtype, const std::string& dtype,
                 std::vector<float> inv_freq, int chunk) {
    if (inv_freq.empty()) inv_freq.assign(head_dim / 2, 0.f);  // no rotation
    AttentionCase attention_case(num_heads, num_kv_heads, head_dim, int(qkv.shape(0)), 1, block_len,
                                 quant_policy, cache_dtype, dtype, std::move(inv_freq));
    return attention_case.run(qkv, context, chunk);
}

// The last lengths[i] rows of each sequence, in one step.
Floats attention_batch(const std::vector<Floats>& qkvs, const std::vector<int>& lengths, int num_heads,
                       int num_kv_heads, int head_dim, int quant_policy, const std::string& cache_dtype,
                       const std::string& dtype) {
    require(qkvs.size() == lengths.size() && !qkvs.empty(), "one length for each sequence");
    int most = 0;
    for (const auto& qkv : qkvs) most = std::max(most, int(qkv.shape(0)));
    AttentionCase attention_case(num_heads, num_kv_heads, head_dim, most, int(qkvs.size()), 64, quant_policy,
                                 cache_dtype, dtype, std::vector<float>(head_dim / 2, 0.f));
    return attention_case.run_batch(qkvs, lengths);
}

// How attention_decode's work is cut for decodes of these many keys: the entries' first units, and the ranges
// (begin, end, head, entry, pair_begin, pair_end, share, first_block, parts).
py::tuple decode_ranges(const std::vector<int>& keys, int num_heads, int num_kv_heads, int bits,
                        int multiprocessors, int padding) {
    ModelConfig model;
    model.num_heads = num_heads;
    model.num_kv_heads = num_kv_heads;
    cuda::TilePlanner planner(model, cuda::AttentionKernels::Decode, bits, multiprocessors);
    BatchData batch;
    for (const int count : keys) {
        Slice slice;
        slice.context = count - 1;
        slice.length = 1;
        batch.slices.push_back(std::move(slice));
    }
    planner.plan(batch, padding);
    py::list first_units, ranges;
    for (const auto& entry : planner.entries) first_units.append(entry.first_unit);
    for (const auto& r : planner.ranges)
        ranges.append(py::make_tuple(r.begin, r.end, r.head, r.entry, r.pair_begin, r.pair_end, r.share,
                                     r.first_block, r.parts));
    return py::make_tuple(first_units, ranges);
}

// What the cache holds after heads [T, D] went through it as values: (codes or bytes, params as float16
// bits).
py::tuple kv_write(const Floats& x, int bits) {
    const int rows = int(x.shape(0)), d = int(x.shape(1)), row_bytes = d * bits / 8;
    const size_t block_bytes = 2 * (size_t(row_bytes) + 4) * rows;
    std::vector<float> qkv(size_t(rows) * 3 * d, 0.f);  // one query, key and value head
    for (int r = 0; r < rows; ++r)
        std::copy_n(x.data() + size_t(r) * d, d, qkv.data() + (size_t(r) * 3 + 2) * d);
    const DeviceArray input(qkv.data(), qkv.size(), DType::F32);
    std::vector<int> positions(rows), zeros(rows, 0);
    for (int r = 0; r < rows; ++r) positions[r] = r;
    const cuda::SliceInfo slice{0, rows, 0, 0};
    const DeviceArray where(positions.data(), rows * 4), zero(zeros.data(), rows * 4),
        slices(&slice, sizeof slice), table(DType::F32, rows), cache(DType::U8, block_bytes);
    const cuda::CacheView view{cache.as<uint8_t>(),
                               int64_t(block_bytes),
                               int64_t(block_bytes),
                               row_bytes,
                               row_bytes * rows,
                               rows * 4,
                               bits,
                               DType::F16,
                               1,
                               d,
                               rows};
    cuda::rope_and_cache(DType::F32,
                         {input.as<void>(), table.as<float>(), table.as<float>(), 0, where.as<int>(),
                          zero.as<int>(), slices.as<cuda::SliceInfo>(), zero.as<int>(), rows, 1},
                         view, 0, nullptr);
    std::vector<uint8_t> bytes(block_bytes);
    cache.read_bytes(bytes.data());
    Bytes codes({py::ssize_t(rows), py::ssize_t(row_bytes)});
    Bits16 params({py::ssize_t(rows), py::ssize_t(2)});
    std::copy_n(bytes.data() + size_t(row_bytes) * rows, codes.nbytes(), codes.mutable_data());
    std::copy_n(bytes.data() + 2 * size_t(row_bytes) * rows + 4 * size_t(rows), params.nbytes(),
                reinterpret_cast<uint8_t*>(params.mutable_data()));
    return py::make_tuple(codes, params);
}

// Tokens of logits [B, V], one set of parameters for all rows but the position, which counts up from
// `position`; -1 for a row that is not finite.
std::vector<int> sample(const Floats& logits, float temperature, int top_k, float top_p, uint64_t seed,
                        uint64_t position, float min_p) {
    require(logits.ndim() == 2, "logits must be [B, V]");
    const int rows = int(logits.shape(0));
    std::vector<cuda::SampleInfo> info(rows);
    const float gap = min_p_gap({temperature, top_k, top_p, seed, min_p});
    for (int r = 0; r < rows; ++r)
        info[r] = {seed, position + uint64_t(r), temperature, top_p, top_k, r, gap, -1};
    const DeviceArray values(logits, DType::F32), parameters(info.data(), info.size() * sizeof info[0]),
        tokens(DType::F32, rows), last(DType::F32, rows);
    const int vocab = int(logits.shape(1));
    const std::vector<unsigned> zeros(rows, 0);
    const DeviceArray parts(DType::U8, size_t(rows) * cuda::sample_pieces(vocab) * sizeof(cuda::SamplePart)),
        counters(zeros.data(), zeros.size() * 4);
    cuda::sample(values.as<float>(), vocab, parameters.as<cuda::SampleInfo>(), rows, tokens.as<int>(),
                 last.as<int>(), {parts.as<cuda::SamplePart>(), counters.as<unsigned>()}, nullptr);
    std::vector<int> result(rows);
    tokens.read_bytes(reinterpret_cast<uint8_t*>(result.data()));
    return result;
}

// logits [B, V] with the edits of each row that has some: (row, repetition, presence, frequency, edits, bans,
// allowed, last_unknown); `last` [B]: the rows' last samples.
using RowEdits = std::tuple<int, float, float, float, std::vector<EditFields>,
                            std::vector<std::pair<int, int>>, std::vector<int>, bool>;
Floats edit_logits(const Floats& logits, const std::vector<RowEdits>& rows, const std::vector<int>& last) {
    const int count = int(logits.shape(0)), vocab = int(logits.shape(1));
    BatchData batch;
    batch.slices.resize(count);
    std::vector<int> sampled(count);
    for (int r = 0; r < count; ++r) batch.slices[r].slot = sampled[r] = r;
    for (const auto& [row, repetition, presence, frequency, edits, bans, allowed, last_unknown] : rows)
        batch.slices[row].edits = std::make_shared<const LogitEdits>(
            logit_edits(repetition, presence, frequency, edits, bans, allowed, last_unknown, vocab));
    const DeviceArray values(logits, DType::F32), lasts(last.data(), last.size() * 4);
    cuda::EditInputs inputs;
    inputs.send(batch, sampled, nullptr);
    cuda::edit_logits(values.as<float>(), vocab, inputs.view(), lasts.as<int>(), nullptr);
    return values.array({count, vocab});
}

// For each row of logits [B, V]: (logprob of its token, [(id, logprob) of the `count` likeliest]).
std::vector<std::pair<float, std::vector<std::pair<int, float>>>> logprobs(const Floats& logits,
                                                                           const std::vector<int>& tokens,
                                                                           int count) {
    require(count <= kMostLogprobs, "count is too large");
    const int rows = int(logits.shape(0)), vocab = int(logits.shape(1));
    const DeviceArray values(logits, DType::F32), chosen(tokens.data(), tokens.size() * 4),
        out(DType::U8, size_t(rows) * sizeof(cuda::LogprobRow));
    cuda::logprobs(values.as<float>(), vocab, nullptr, count, chosen.as<int>(), rows,
                   out.as<cuda::LogprobRow>(), nullptr);
    std::vector<cuda::LogprobRow> found(rows);
    out.read_bytes(reinterpret_cast<uint8_t*>(found.data()));
    std::vector<std::pair<float, std::vector<std::pair<int, float>>>> result(rows);
    for (int r = 0; r < rows; ++r) {
        result[r].first = found[r].logprob;
        for (int i = 0; i < found[r].count; ++i)
            result[r].second.emplace_back(found[r].ids[i], found[r].values[i]);
    }
    return result;
}

}  // namespace

void register_kernels_cuda(py::module_& parent) {
    py::module_ m = parent.def_submodule("kernels_cuda", "Single GPU kernels on numpy arrays, for tests.");
    const Floats none(0);
    m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("delta"), py::arg("w"), py::arg("eps"),
          py::arg("dtype"));
    m.def("silu_gate", &silu_gate, py::arg("gate_up"), py::arg("dtype"));
    m.def("dense_linear", &dense_linear, py::arg("x"), py::arg("w"), py::arg("bias") = none, py::arg("dtype"),
          py::arg("out_dtype"));
    m.def("w4_linear", &w4_linear, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("zeros"),
          py::arg("n"), py::arg("k"), py::arg("bias") = none, py::arg("dtype"), py::arg("scale_dtype"),
          py::arg("out_dtype"), py::arg("way") = "", py::arg("plan") = py::none());
    m.def("w4_chain", &w4_chain, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("count"),
          py::arg("dtype"), py::arg("overlap"));
    m.def("attention", &attention, py::arg("qkv"), py::arg("num_heads"), py::arg("num_kv_heads"),
          py::arg("head_dim"), py::arg("context"), py::arg("block_len") = 64, py::arg("quant_policy") = 0,
          py::arg("cache_dtype"), py::arg("dtype"), py::arg("inv_freq") = std::vector<float>(),
          py::arg("chunk") = 1 << 20);
    m.def("attention_batch", &attention_batch, py::arg("qkvs"), py::arg("lengths"), py::arg("num_heads"),
          py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("quant_policy") = 0, py::arg("cache_dtype"),
          py::arg("dtype"));
    m.def("decode_ranges", &decode_ranges, py::arg("keys"), py::arg("num_heads"), py::arg("num_kv_heads"),
          py::arg("bits"), py::arg("multiprocessors"), py::arg("padding") = 0);
    m.def("kv_write", &kv_write, py::arg("x"), py::arg("bits"));
    m.def("sample", &sample, py::arg("logits"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
          py::arg("seed"), py::arg("position"), py::arg("min_p") = 0.f);
    m.def("edit_logits", &edit_logits, py::arg("logits"), py::arg("rows"), py::arg("last"));
    m.def("logprobs", &logprobs, py::arg("logits"), py::arg("tokens"), py::arg("count"));
    register_bench_cuda(m);
}

}  // namespace turbomill::python

#else

namespace turbomill::python {

void register_kernels_cuda(pybind11::module_&) {}

}  // namespace turbomill::python

#endif
