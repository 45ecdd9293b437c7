// Linears on the GPU: which kernel runs which weight at how many rows.
#pragma once

#include "kernels/cuda/device_weights.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

// Rows up to which Hopper multiplies a dense weight by dense_fused: with more, cuBLASLt was measured to be
// faster.
constexpr int kDenseFused = 64;

// Where the fused kernels do not run: rows up to which a w4 weight is read in place, kFewRows at a time;
// beyond, it is made dense for cuBLASLt.
constexpr int kW4InPlace = 64;

// Where the fused kernels do not run: rows up to which a w8 weight is read in place; beyond, it is made dense
// for cuBLASLt.
constexpr int kW8InPlace = 128;
// Elements of a w8 weight that are dense at a time: an output matrix would need more memory than its codes.
constexpr size_t kW8Dense = size_t(1) << 27;

// A linear whose pointers are device pointers.
struct DeviceLinear {
    int n = 0, k = 0;
    const void* dense = nullptr;  // [N, K] in the activation type, or null
    W4View w4{};                  // without codes unless it is one
    W8View w8{};                  // likewise
    const float* bias = nullptr;  // [N] or null
};

DeviceLinear device_view(const Linear& w, const DeviceWeights& weights);
// Of the first of experts that lie one behind the other.
DeviceLinear expert_view(const Linear& w, const DeviceWeights& weights);

class LinearRunner {
  public:
    // `largest_unfused`, `largest_w8`: elements of the largest w4 and w8 weight that the fused kernels do not
    // take at every number of rows: only those need workspaces.
    LinearRunner(DType type, size_t largest_unfused, size_t largest_w8, cudaStream_t stream);

    // y [rows, N] = x [rows, K] w^T + bias; y in the activation type, or fp32 if `out` says so
    void operator()(const DeviceLinear& w, const void* x, int rows, void* y, DType out);

    // y [rows, N/2] = silu(gate) * up of x w^T + bias, whose columns interleave them by eights. False, and
    // nothing done, where that is not fused.
    bool silu_gated(const DeviceLinear& w, const void* x, int rows, void* y);

    // From here on, a packed weight may begin to arrive before the kernel launched before it is done: for
    // callers whose every write to weights was synchronized.
    void set_overlap(bool overlap) { overlap_ = overlap; }

    // The ways for a w4 weight, which operator() chooses from: the fused kernels where they fit.
    void w4_fused(const DeviceLinear& w, const void* x, int rows, void* y, DType out, const FusedPlan& plan);
    void w4_in_place(const DeviceLinear& w, const void* x, int rows, void* y, DType out);
    void w4_as_dense(const DeviceLinear& w, const void* x, int rows, void* y, DType out);
    // Likewise for a w8 weight: the fused kernels where w8_fused_fits; `splits` of K, 0 chooses. As a dense
    // matrix in pieces of rows that fit the workspace.
    void w8_fused(const DeviceLinear& w, const void* x, int rows, void* y, DType out, const FusedPlan& plan);
    void w8_in_place(const DeviceLinear& w, const void* x, int rows, void* y, DType out, int splits = 0);
    void w8_as_dense(const DeviceLinear& w, const void* x, int rows, void* y, DType out);

  private:
    FusedPlan plan_for(int bits, const DeviceLinear& w, int rows) const {
        return choose_fused_plan(bits, w.n, w.k, rows, workspace_.multiprocessors, overlaps(rows));
    }
    bool overlaps(int rows) const { return fused_overlaps(rows, overlap_); }
    void dense(const void* matrix, const DeviceLinear& w, const void* x, int rows, void* y, DType out);

    DType type_;
    cudaStream_t stream_;
    Gemm gemm_;
    DeviceMemory partial_, counters_, dense_;
    W4Workspace workspace_;
    bool overlap_ = false;
};

}  // namespace turbomill::cuda
