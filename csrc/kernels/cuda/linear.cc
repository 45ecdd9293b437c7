#include "kernels/cuda/linear.h"

#include <algorithm>

#include "kernels/cuda/error.h"

namespace turbomill::cuda {
namespace {

constexpr size_t kPartialFloats = size_t(4) << 20;
constexpr int kCounters = 1 << 16;  // tiles of 64 rows of N: more than any vocabulary needs

constexpr int kMostOverlappingW8 = 32;  // rows: with more, overlapping was measured to be slower

const char* const kAdvice = "lower cache_max_entry_count";

DeviceLinear view_of(const Linear& w, Kept kept, const DeviceWeights& weights) {
    DeviceLinear view;
    view.n = w.n;
    view.k = w.k;
    view.bias = weights.at(w.bias);
    if (kept == Kept::Dense) {
        view.dense = weights.at(w.dense ? w.dense : w.codes);
        return view;
    }
    const auto* codes = static_cast<const uint8_t*>(weights.at(w.codes));
    const void *scales = weights.at(w.scales), *zeros = w.zeros ? weights.at(w.zeros) : nullptr,
               *mins = w.mins ? weights.at(w.mins) : nullptr;
    const bool bf16 = w.dtype == DType::BF16;
    if (kept == Kept::W4)
        view.w4 = {{codes, scales, zeros, bf16, w.n, w.k, w.k_tiles, w.groups, w.group}};
    else
        view.w8 = {{codes, scales, zeros, bf16, w.n, w.k, w.k_tiles, w.groups, w.group}, mins};
    return view;
}

}  // namespace

DeviceLinear device_view(const Linear& w, const DeviceWeights& weights) {
    return view_of(w, kept(w), weights);
}

DeviceLinear expert_view(const Linear& w, const DeviceWeights& weights) {
    return view_of(w, kept_expert(w), weights);
}

LinearRunner::LinearRunner(DType type, size_t largest_unfused, size_t largest_w8, cudaStream_t stream)
    : type_(type), stream_(stream) {
    int device = 0, multiprocessors = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "counting multiprocessors");
    workspace_ = {};
    workspace_.multiprocessors = multiprocessors;
    const size_t largest = std::max(largest_unfused, std::min(largest_w8, kW8Dense));
    if (!largest) return;
    partial_ = DeviceMemory(kPartialFloats * 4, "the partial sums", kAdvice);
    counters_ = DeviceMemory(kCounters * 4, "the counters", kAdvice);
    dense_ = DeviceMemory(largest * dtype_bytes(type), "the dequantized weight", kAdvice);
    check(cudaMemsetAsync(counters_.as(), 0, counters_.bytes(), stream), "clearing counters");
    workspace_ = {partial_.as<float>(), kPartialFloats, counters_.as<unsigned>(), kCounters, multiprocessors};
}

void LinearRunner::operator()(const DeviceLinear& w, const void* x, int rows, void* y, DType out) {
    if (w.dense) {
        dense(w.dense, w, x, rows, y, out);
    } else if (w.w8.codes) {
        if (w8_fused_fits(type_, w.w8, x, rows))
            w8_fused(w, x, rows, y, out, plan_for(8, w, rows));
        else if (rows <= kW8InPlace && w8_rows_fits(w.w8, x))
            w8_in_place(w, x, rows, y, out);
        else
            w8_as_dense(w, x, rows, y, out);
    } else if (w4_fused_fits(type_, w.w4, x)) {
        w4_fused(w, x, rows, y, out, plan_for(4, w, rows));
    } else if (rows <= kW4InPlace) {
        w4_in_place(w, x, rows, y, out);
    } else {
        w4_as_dense(w, x, rows, y, out);
    }
}

bool LinearRunner::silu_gated(const DeviceLinear& w, const void* x, int rows, void* y) {
    if (w.n % 16) return false;
    const int multiprocessors = workspace_.multiprocessors;
    const bool overlap = overlaps(rows);
    if (w.dense && rows <= kDenseFused && dense_fused_fits(type_, w.dense, w.k, x))
        dense_fused(type_, type_, w.dense, w.n, w.k, x, w.bias, y, rows, multiprocessors, overlap, stream_,
                    true);
    else if (w.w4.codes && w4_fused_fits(type_, w.w4, x))
        cuda::w4_fused(type_, type_, w.w4, x, w.bias, y, rows, plan_for(4, w, rows), multiprocessors, overlap,
                       stream_, true);
    else if (w.w8.codes && w8_fused_fits(type_, w.w8, x, rows))
        cuda::w8_fused(type_, type_, w.w8, x, w.bias, y, rows, plan_for(8, w, rows), multiprocessors, overlap,
                       stream_, true);
    else
        return false;
    return true;
}

void LinearRunner::w4_fused(const DeviceLinear& w, const void* x, int rows, void* y, DType out,
                            const FusedPlan& plan) {
    cuda::w4_fused(type_, out, w.w4, x, w.bias, y, rows, plan, workspace_.multiprocessors, overlaps(rows),
                   stream_);
}

void LinearRunner::w8_fused(const DeviceLinear& w, const void* x, int rows, void* y, DType out,
                            const FusedPlan& plan) {
    cuda::w8_fused(type_, out, w.w8, x, w.bias, y, rows, plan, workspace_.multiprocessors, overlaps(rows),
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

void LinearRunner::w8_in_place(const DeviceLinear& w, const void* x, int rows, void* y, DType out,
                               int splits) {
    const bool overlap = overlaps(rows) && rows <= kMostOverlappingW8;
    w8_rows(type_, out, w.w8, x, w.bias, y, rows, splits, workspace_, overlap, stream_);
}

void LinearRunner::w8_as_dense(const DeviceLinear& w, const void* x, int rows, void* y, DType out) {
    const size_t room = dense_.bytes() / dtype_bytes(type_) / w.k;
    // Pieces whose results cuBLASLt finds aligned.
    const int piece = room >= size_t(w.n) ? w.n : int(room / 128 * 128);
    if (!piece) throw std::logic_error("no workspace for a dequantized weight");
    for (int first = 0; first < w.n; first += piece) {
        const int count = std::min(piece, w.n - first);
        w8_dequantize(type_, w.w8, first, count, dense_.as(), stream_);
        gemm_(type_, out, dense_.as(), x, static_cast<uint8_t*>(y) + size_t(first) * dtype_bytes(out), rows,
              count, w.k, w.n, stream_);
    }
    if (w.bias) add_bias(out, y, w.bias, rows, w.n, stream_);
}

void LinearRunner::dense(const void* matrix, const DeviceLinear& w, const void* x, int rows, void* y,
                         DType out) {
    if (rows <= kDenseFused && dense_fused_fits(type_, matrix, w.k, x))
        return dense_fused(type_, out, matrix, w.n, w.k, x, w.bias, y, rows, workspace_.multiprocessors,
                           overlaps(rows), stream_);
    gemm_(type_, out, matrix, x, y, rows, w.n, w.k, w.n, stream_);
    if (w.bias) add_bias(out, y, w.bias, rows, w.n, stream_);
}

}  // namespace turbomill::cuda
