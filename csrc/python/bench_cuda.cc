// Timers of single kernels on the GPU: CUDA-graph replays, medians, and data that the L2 cache cannot hold.
#ifdef TM_CUDA

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/half.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "python/bench_tools.h"
#include "python/cuda_array.h"
#include "python/register.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using cuda::check;
using cuda::DeviceMemory;

// A linear's data: as many copies of the weight as no cache holds, x and y.
class LinearCase {
  public:
    // `bits` of the weight: 4, 8, or 16, which is dense.
    LinearCase(int n, int k, int rows, int group, DType type, int bits)
        : n_(n), k_(k), rows_(rows), group_(group), type_(type), bits_(bits) {
        const size_t weight_bytes = size_t(n) * k * bits / 8;
        const int copies = int(std::clamp<size_t>(kColdBytes / weight_bytes + 1, 2, 64));
        const auto values = random_halves(kPattern, type, -1.f, 1.f),
                   scales = random_halves(kPattern, type, 0.01f, 0.02f);
        std::mt19937 generator(3);
        std::vector<uint16_t> codes(kPattern);
        for (auto& c : codes) c = uint16_t(generator());
        const size_t group_bytes = size_t(n) * (k / group) * 2;
        for (int i = 0; i < copies; ++i) {
            weights_.push_back(random_memory(weight_bytes, bits == 16 ? values : codes));
            params_.push_back(random_memory(group_bytes, scales));
        }
        x_ = random_memory(size_t(rows) * k * 2, values);
        y_ = DeviceMemory(size_t(rows) * n * 2, "y", "");
    }

    // Microseconds. `way`: "in_place" (a w8 weight's with `splits`), "as_dense" or "fused" with `plan` of a
    // packed weight, "" the engine's. `overlap`: with programmatic dependent launch.
    double time(const std::string& way, const std::optional<PlanTuple>& plan, bool overlap, int repeats,
                int splits = 0) const {
        const size_t elements = way == "fused" ? 0 : size_t(n_) * k_;
        cuda::LinearRunner run(type_, bits_ == 4 ? elements : 0, bits_ == 8 ? elements : 0, stream_);
        run.set_overlap(overlap);
        const auto call = [&](int i) {
            const cuda::DeviceLinear linear = copy(i);
            if (bits_ == 8 && way == "in_place") {
                run.w8_in_place(linear, x_.as(), rows_, y_.as(), type_, splits);
            } else if (bits_ == 8 && way == "as_dense") {
                run.w8_as_dense(linear, x_.as(), rows_, y_.as(), type_);
            } else if (way == "in_place") {
                run.w4_in_place(linear, x_.as(), rows_, y_.as(), type_);
            } else if (way == "as_dense") {
                run.w4_as_dense(linear, x_.as(), rows_, y_.as(), type_);
            } else if (way == "fused") {
                if (!plan || !(bits_ == 8 ? cuda::w8_fused_fits(type_, linear.w8, x_.as(), rows_)
                                          : cuda::w4_fused_fits(type_, linear.w4, x_.as())))
                    throw std::invalid_argument("the fused kernels do not fit here, or there is no plan");
                if (bits_ == 8)
                    run.w8_fused(linear, x_.as(), rows_, y_.as(), type_, plan_of(*plan));
                else
                    run.w4_fused(linear, x_.as(), rows_, y_.as(), type_, plan_of(*plan));
            } else {
                run(linear, x_.as(), rows_, y_.as(), type_);
            }
        };
        return time_graph(stream_, int(weights_.size()), repeats, call);
    }

  private:
    cuda::DeviceLinear copy(int i) const {
        cuda::DeviceLinear linear;
        linear.n = n_;
        linear.k = k_;
        if (bits_ == 16) {
            linear.dense = weights_[i].as();
        } else if (bits_ == 8) {
            linear.w8 = {packed(i), nullptr};
        } else {
            linear.w4 = {packed(i)};
        }
        return linear;
    }
    cuda::PackedView packed(int i) const {
        return {weights_[i].as<uint8_t>(),
                params_[i].as(),
                nullptr,
                type_ == DType::BF16,
                n_,
                k_,
                k_ / 64,
                k_ / group_,
                group_};
    }

    int n_, k_, rows_, group_;
    DType type_;
    int bits_;
    cuda::Stream stream_;
    std::vector<DeviceMemory> weights_, params_;
    DeviceMemory x_, y_;
};

double bench_linear(int n, int k, int rows, int group, const std::string& dtype, const std::string& way,
                    bool overlap, int repeats, int bits, int splits) {
    return LinearCase(n, k, rows, group, parse_dtype(dtype), bits)
        .time(way, std::nullopt, overlap, repeats, splits);
}

// Microseconds of each plan of the fused kernels, each after a pause: the GPU's clock gives way to work, and
// plans must not pay for those before them.
std::vector<double> bench_plans(int bits, int n, int k, int rows, int group, const std::string& dtype,
                                const std::vector<PlanTuple>& plans, bool overlap, int repeats) {
    constexpr auto kPause = std::chrono::milliseconds(20);
    const LinearCase linear(n, k, rows, group, parse_dtype(dtype), bits);
    std::vector<double> times;
    for (const auto& plan : plans) {
        std::this_thread::sleep_for(kPause);
        times.push_back(linear.time("fused", plan, overlap, repeats));
    }
    return times;
}

// Microseconds of one layer's attention for `batch` sequences that add `length` tokens to `context` ones
// each.
double bench_attention(int batch, int context, int length, int num_heads, int num_kv_heads, int head_dim,
                       int block_len, int quant_policy, const std::string& dtype, bool rotation,
                       int repeats) {
    ModelConfig model;
    model.num_layers = 1;
    model.hidden_size = 64;
    model.vocab_size = 1;
    model.num_heads = num_heads;
    model.num_kv_heads = num_kv_heads;
    model.head_dim = head_dim;
    model.intermediate_size = 8;
    const int total = context + length, blocks = ceil_div(total, block_len);
    EngineConfig config;
    config.device = "cuda";
    config.session_len = total;
    config.max_prefill_token_num = std::max(total, batch * length);
    config.max_batch_size = batch;
    config.block_len = block_len;
    config.cache_block_count = batch * blocks;
    config.quant_policy = quant_policy;
    config.kv_rotation = rotation;
    config.cache_dtype = dtype;
    const DType type = parse_dtype(dtype);
    const std::vector<uint8_t> embedding(64 * 4, 0);
    Weights weights;
    weights.embedding.n = 1;
    weights.embedding.k = 64;
    weights.embedding.dtype = type;
    weights.embedding.dense = embedding.data();
    weights.output = weights.embedding;
    cuda::CudaBackend backend(model, config, weights, std::vector<float>(head_dim / 2, 0.f), {});

    const int rows = config.max_prefill_token_num;
    const auto qkv = backend.allocate(rows, model.qkv_dim()), out = backend.allocate(rows, model.q_dim());
    const auto pattern = random_halves(kPattern, type, -2.f, 2.f);
    for (size_t at = 0, bytes = size_t(rows) * model.qkv_dim() * 2; at < bytes; at += kPattern * 2)
        check(cudaMemcpy(static_cast<uint8_t*>(qkv->data()) + at, pattern.data(),
                         std::min(kPattern * 2, bytes - at), cudaMemcpyHostToDevice),
              "filling");
    const auto slice_of = [&](int sequence, int begin, int count) {
        Slice slice;
        slice.context = begin;
        slice.length = count;
        slice.tokens.assign(count, 0);
        slice.sample = count == 1;  // decodes: attention rotates and caches, as in an engine
        for (int b = 0; b < blocks; ++b)
            slice.blocks.push_back((b * batch + sequence) % config.cache_block_count);
        return slice;
    };
    for (int i = 0; i < batch; ++i) {  // every sequence's cache
        BatchData fill_batch;
        fill_batch.slices.push_back(slice_of(i, 0, total));
        backend.begin_step(fill_batch);
        backend.rope_and_cache(0, *qkv);
        backend.synchronize();
    }
    BatchData step;
    for (int i = 0; i < batch; ++i) step.slices.push_back(slice_of(i, context, length));
    backend.begin_step(step);
    const cuda::NoOverlap apart;  // a launch must not hide in the one before it
    return time_graph(backend.stream(), 4, repeats, [&](int) { backend.attention(0, *qkv, *out); });
}

// Bytes a second, read and written together, of a large device-to-device copy.
double bench_copy() {
    const size_t bytes = size_t(4) << 30;
    const cuda::Stream stream;
    const auto pattern = random_halves(kPattern, DType::F16, -1.f, 1.f);
    const DeviceMemory from = random_memory(bytes, pattern), to(bytes, "a copy", "");
    cudaEvent_t begin = nullptr, end = nullptr;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = 0; i < 11; ++i) {
        check(cudaEventRecord(begin, stream), "event");
        check(cudaMemcpyAsync(to.as(), from.as(), bytes, cudaMemcpyDeviceToDevice, stream), "copy");
        check(cudaEventRecord(end, stream), "event");
        check(cudaEventSynchronize(end), "copy");
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
        if (i >= 2) times.push_back(milliseconds);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return 2.0 * double(bytes) / (double(times[times.size() / 2]) * 1e-3);
}

}  // namespace

void register_bench_cuda(py::module_& m) {
    m.def("bench_linear", &bench_linear, py::arg("n"), py::arg("k"), py::arg("rows"), py::arg("group") = 128,
          py::arg("dtype") = "float16", py::arg("way") = "", py::arg("overlap") = false,
          py::arg("repeats") = 15, py::arg("bits") = 4, py::arg("splits") = 0);
    m.def("bench_plans", &bench_plans, py::arg("bits"), py::arg("n"), py::arg("k"), py::arg("rows"),
          py::arg("group"), py::arg("dtype"), py::arg("plans"), py::arg("overlap") = false,
          py::arg("repeats") = 9);
    m.def("multiprocessors", &multiprocessors);
    m.def("w4_fused_runs", &cuda::w4_fused_runs);
    m.def("fused_plan", [](int bits, int n, int k, int rows, bool overlap) {
        const auto [kernel, splits] =
            cuda::choose_fused_plan(bits, n, k, rows, multiprocessors(), cuda::fused_overlaps(rows, overlap));
        return PlanTuple{kernel.warpgroups, kernel.tokens, kernel.blocks, splits};
    });
    m.def("fused_kernels", [](int bits) {
        std::vector<std::array<int, 3>> kernels;
        for (const auto& kernel : cuda::fused_kernels(bits))
            kernels.push_back({kernel.warpgroups, kernel.tokens, kernel.blocks});
        return kernels;
    });
    m.def("bench_attention", &bench_attention, py::arg("batch"), py::arg("context"), py::arg("length"),
          py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("block_len") = 64,
          py::arg("quant_policy") = 0, py::arg("dtype") = "float16", py::arg("rotation") = false,
          py::arg("repeats") = 9);
    m.def("bench_copy", &bench_copy);
    register_bench_cuda_moe(m);
}

}  // namespace turbomill::python

#endif
