// Attention and the KV cache on the GPU, for tests.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/tiles.h"
#include "python/cuda_array.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using cuda::check;

// What sets a layer's attention apart; zeros and empty vectors: nothing.
struct Variant {
    int window = 0;
    float softcap = 0.f, scale = 0.f;
    std::vector<float> q_norm, k_norm;      // [D]
    bool rotation = false, centre = false;  // of the cache; the centre is of all keys
};

// Causal attention through the paged cache of a one-layer backend, whose blocks are handed out in reverse, to
// several sequences in turn. rope_and_cache writes it, with the rotation of `inv_freq`.
class AttentionCase {
  public:
    AttentionCase(int num_heads, int num_kv_heads, int head_dim, int tokens, int sequences, int block_len,
                  int quant_policy, const std::string& cache_dtype, const std::string& dtype,
                  std::vector<float> inv_freq, Variant variant)
        : type_(parse_dtype(dtype)), variant_(std::move(variant)) {
        model_.num_layers = 1;
        model_.hidden_size = 64;
        model_.vocab_size = 1;
        model_.num_heads = num_heads;
        model_.num_kv_heads = num_kv_heads;
        model_.head_dim = head_dim;
        model_.intermediate_size = 8;
        if (variant_.window) model_.layer_windows = {variant_.window};
        model_.attention_softcap = variant_.softcap;
        model_.attention_scale = variant_.scale;
        model_.qk_norm = !variant_.q_norm.empty();
        weights_.layers.resize(1);
        weights_.layers[0].q_norm = variant_.q_norm;
        weights_.layers[0].k_norm = variant_.k_norm;
        config_.device = "cuda";
        config_.session_len = ceil_div(tokens, block_len) * block_len;
        config_.max_prefill_token_num = config_.session_len * sequences;
        config_.max_batch_size = sequences + 7;  // so that steps of decodes are padded
        config_.block_len = block_len;
        config_.cache_block_count = sequences * ceil_div(tokens, block_len);
        config_.quant_policy = quant_policy;
        config_.cache_dtype = cache_dtype;
        config_.kv_rotation = variant_.rotation;
        embedding_.assign(64 * 4, 0);
        weights_.embedding.n = 1;
        weights_.embedding.k = 64;
        weights_.embedding.dtype = type_;
        weights_.embedding.dense = embedding_.data();
        weights_.output = weights_.embedding;
        backend_.emplace(model_, config_, weights_, inv_freq, std::vector<float>());
        poison_cache();
    }

    // Attention outputs of rows [context, T) of qkv [T, (Nq + 2 Nkv) D], which come in chunks of at most
    // `chunk` rows.
    Floats run(const Floats& qkv, int context, int chunk) {
        const int tokens = rows_of(qkv), out_width = model_.q_dim();
        if (variant_.centre) {
            backend_->begin_centring();
            step({&qkv}, {0}, {tokens});
            backend_->end_centring();
        }
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
        if (model_.qk_norm) backend_->qk_norm(weights_.layers[0].q_norm, weights_.layers[0].k_norm, *x);
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
    Variant variant_;
    ModelConfig model_;
    EngineConfig config_;
    Weights weights_;
    std::vector<uint8_t> embedding_;
    std::optional<cuda::CudaBackend> backend_;
};

Floats attention(const Floats& qkv, int num_heads, int num_kv_heads, int head_dim, int context, int block_len,
                 int quant_policy, const std::string& cache_dtype, const std::string& dtype,
                 std::vector<float> inv_freq, int chunk, int window, float softcap, float scale,
                 const std::vector<float>& q_norm, const std::vector<float>& k_norm, bool rotation,
                 bool centre) {
    if (inv_freq.empty()) inv_freq.assign(head_dim / 2, 0.f);  // no rotation
    AttentionCase attention_case(num_heads, num_kv_heads, head_dim, int(qkv.shape(0)), 1, block_len,
                                 quant_policy, cache_dtype, dtype, std::move(inv_freq),
                                 {window, softcap, scale, q_norm, k_norm, rotation, centre});
    return attention_case.run(qkv, context, chunk);
}

// The last lengths[i] rows of each sequence, in one step.
Floats attention_batch(const std::vector<Floats>& qkvs, const std::vector<int>& lengths, int num_heads,
                       int num_kv_heads, int head_dim, int quant_policy, const std::string& cache_dtype,
                       const std::string& dtype, int window, float softcap, float scale, bool rotation) {
    require(qkvs.size() == lengths.size() && !qkvs.empty(), "one length for each sequence");
    int most = 0;
    for (const auto& qkv : qkvs) most = std::max(most, int(qkv.shape(0)));
    AttentionCase attention_case(num_heads, num_kv_heads, head_dim, most, int(qkvs.size()), 64, quant_policy,
                                 cache_dtype, dtype, std::vector<float>(head_dim / 2, 0.f),
                                 {window, softcap, scale, {}, {}, rotation});
    return attention_case.run_batch(qkvs, lengths);
}

// How attention_decode's work is cut for decodes of these many keys: the entries' first units, and the ranges
// (begin, end, head, entry, pair_begin, pair_end, share, first_block, parts).
py::tuple decode_ranges(const std::vector<int>& keys, int num_heads, int num_kv_heads, int quant_policy,
                        int multiprocessors, int padding, int window) {
    ModelConfig model;
    model.num_layers = 1;
    model.layer_windows = {window};
    model.num_heads = num_heads;
    model.num_kv_heads = num_kv_heads;
    cuda::TilePlanner planner(model, cuda::AttentionKernels::Decode, quant_policy, multiprocessors);
    BatchData batch;
    for (const int count : keys) {
        Slice slice;
        slice.context = count - 1;
        slice.length = 1;
        batch.slices.push_back(std::move(slice));
    }
    planner.plan(batch, padding);
    py::list first_units, ranges;
    const cuda::DecodePlan& plan = planner.decode_plans.front();
    for (const auto& entry : plan.entries) first_units.append(entry.first_unit);
    for (const auto& r : plan.ranges)
        ranges.append(py::make_tuple(r.begin, r.end, r.head, r.entry, r.pair_begin, r.pair_end, r.share,
                                     r.first_block, r.parts));
    return py::make_tuple(first_units, ranges);
}

// What the cache holds after heads [T, D] went through it as values: (codes or bytes, params as float16
// bits).
py::tuple kv_write(const Floats& x, int quant_policy) {
    const KvFormats formats = kv_formats(quant_policy);
    const int rows = int(x.shape(0)), d = int(x.shape(1)), row_bytes = d * code_bits(formats.value) / 8,
              key_bytes = d * code_bits(formats.key) / 8;
    const size_t block_bytes = (size_t(row_bytes) + key_bytes + 8) * rows;
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
                               {key_bytes, row_bytes},
                               {key_bytes * rows, row_bytes * rows},
                               rows * 4,
                               quant_policy,
                               {formats.key, formats.value},
                               DType::F16,
                               1,
                               d,
                               rows,
                               false,
                               nullptr};
    cuda::rope_and_cache(
        DType::F32,
        {input.as<void>(), table.as<float>(), table.as<float>(), 0, where.as<int>(), zero.as<int>(),
         slices.as<cuda::SliceInfo>(), zero.as<int>(), rows, 1, nullptr, nullptr, 0.f},
        view, nullptr);
    std::vector<uint8_t> bytes(block_bytes);
    cache.read_bytes(bytes.data());
    Bytes codes({py::ssize_t(rows), py::ssize_t(row_bytes)});
    Bits16 params({py::ssize_t(rows), py::ssize_t(2)});
    std::copy_n(bytes.data() + size_t(key_bytes) * rows, codes.nbytes(), codes.mutable_data());
    std::copy_n(bytes.data() + (size_t(key_bytes) + row_bytes) * rows + 4 * size_t(rows), params.nbytes(),
                reinterpret_cast<uint8_t*>(params.mutable_data()));
    return py::make_tuple(codes, params);
}

}  // namespace

void register_kernels_cuda_attention(py::module_& m) {
    m.def("attention", &attention, py::arg("qkv"), py::arg("num_heads"), py::arg("num_kv_heads"),
          py::arg("head_dim"), py::arg("context"), py::arg("block_len") = 64, py::arg("quant_policy") = 0,
          py::arg("cache_dtype"), py::arg("dtype"), py::arg("inv_freq") = std::vector<float>(),
          py::arg("chunk") = 1 << 20, py::arg("window") = 0, py::arg("softcap") = 0.f, py::arg("scale") = 0.f,
          py::arg("q_norm") = std::vector<float>(), py::arg("k_norm") = std::vector<float>(),
          py::arg("rotation") = false, py::arg("centre") = false);
    m.def("attention_batch", &attention_batch, py::arg("qkvs"), py::arg("lengths"), py::arg("num_heads"),
          py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("quant_policy") = 0, py::arg("cache_dtype"),
          py::arg("dtype"), py::arg("window") = 0, py::arg("softcap") = 0.f, py::arg("scale") = 0.f,
          py::arg("rotation") = false);
    m.def("decode_ranges", &decode_ranges, py::arg("keys"), py::arg("num_heads"), py::arg("num_kv_heads"),
          py::arg("quant_policy"), py::arg("multiprocessors"), py::arg("padding") = 0, py::arg("window") = 0);
    m.def("kv_write", &kv_write, py::arg("x"), py::arg("quant_policy"));
}

}  // namespace turbomill::python

#endif
