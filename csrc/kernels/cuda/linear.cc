#include "kernels/cuda/linear.h"

#include <algorithm>

#include "kernels/cuda/error.h"

namespace turbomill::cuda {
namespace {

constexpr size_t kPartialFloats = size_t(2) << 20;
constexpr int kCounters = 1 << 16;  // tiles of 64 rows of N: more than any vocabulary needs

constexpr int kFewestGated =
    9;  // rows from which the gate is fused: with fewer, that was measured to be slower

const char* const kAdvice = "lower cache_max_entry_count";

}  // namespace

DeviceLinear device_view(const Linear& w, const DeviceWeights& weights) {
    DeviceLinear view;
    view.n = w.n;
    view.k = w.k;
    view.bias = weights.at(w.bias);
    if (w.dense || w.plain_only()) {
        view.dense = weights.at(w.dense ? w.dense : w.codes);
        return view;
    }
    view.w4 = {static_cast<const uint8_t*>(weights.at(w.codes)),
               weights.at(w.scales),
               w.zeros ? weights.at(w.zeros) : nullptr,
               w.dtype == DType::BF16,
               w.n,
               w.k,
               w.k_tiles,
               w.groups,
               w.group};
    return view;
}

LinearRunner::LinearRunner(DType type, size_t largest_unfused, cudaStream_t stream)
    : type_(type), stream_(stream) {
    int device = 0, multiprocessors = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "counting multiprocessors");
    workspace_ = {};
    workspace_.multiprocessors = multiprocessors;
    if (!largest_unfused) return;
    partial_ = DeviceMemory(kPartialFloats * 4, "the partial sums", kAdvice);
    counters_ = DeviceMemory(kCounters * 4, "the counters", kAdvice);
    dense_ = DeviceMemory(largest_unfused * dtype_bytes(type), "the dequantized weight", kAdvice);
    check(cudaMemsetAsync(counters_.as(), 0, counters_.bytes(), stream), "clearing counters");
    workspace_ = {partial_.as<float>(), kPartialFloats, counters_.as<unsigned>(), kCounters, multiprocessors};
}

void LinearRunner::operator()(const DeviceLinear& w, const void* x, int rows, void* y, DType out) {
    if (w.dense) {
        dense(w.dense, w, x, rows, y, out);
    } else if (w4_fused_fits(type_, w.w4, x)) {
        w4_fused(w, x, rows, y, out,
                 choose_w4_plan(w.n, w.k, rows, workspace_.multiprocessors, overlaps(rows)));
    } else if (rows <= kW4InPlace) {
        w4_in_place(w, x, rows, y, out);
    } else {
        w4_as_dense(w, x, rows, y, out);
    }
}

bool LinearRunner::silu_gated(const DeviceLinear& w, const void* x, int rows, void* y) {
    if (w.dense || rows < kFewestGated || !w4_fused_fits(type_, w.w4, x) || w.n % 16) return false;
    const W4Plan plan = choose_w4_plan(w.n, w.k, rows, workspace_.multiprocessors, overlaps(rows));
    cuda::w4_fused(type_, type_, w.w4, x, w.bias, y, rows, plan, workspace_.multiprocessors, overlaps(rows),
                   stream_, true);
    return true;
}

void LinearRunner::w4_fused(const DeviceLinear& w, const void* x, int rows, void* y, DType out,
                            const W4Plan& plan) {
    cuda::w4_fused(type_, out, w.w4, x, w.bias, y, rows, plan, workspace_.multiprocessors, overlaps(rows),
                   stream_);
}

void LinearRunner::w4_in_place(const DeviceLinear& w, const void* x, int rows, void* y, DType out) {
    for (int row = 0; row < rows; row += kFewRows) {
        w4_few_rows(type_, out, w.w4, static_cast<const uint8_t*>(x) + size_t(row) * w.k * dtype_bytes(type_),
                    w.bias, static_cast<uint8_t*>(y) + size_t(row) * w.n * dtype_bytes(out),
                    std::min(kFewRows, rows - row), workspace_, stream_);
    }
}

void LinearRunner::w4_as_dense(const DeviceLinear& w, const void* x, int rows, void* y, DType out) {
    w4_dequantize(type_, w.w4, dense_.as(), stream_);
    dense(dense_.as(), w, x, rows, y, out);
}

void LinearRunner::dense(const void* matrix, const DeviceLinear& w, const void* x, int rows, void* y,
                         DType out) {
    gemm_(type_, out, matrix, x, y, rows, w.n, w.k, stream_);
    if (w.bias) add_bias(out, y, w.bias, rows, w.n, stream_);
}

}  // namespace turbomill::cuda
