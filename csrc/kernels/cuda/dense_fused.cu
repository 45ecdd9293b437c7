// Launching the kernels of dense_fused.cuh, and which of them.
#include <algorithm>

#include "kernels/cuda/dense_fused.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/tensor_map.h"

namespace turbomill::cuda {
namespace {

constexpr int kMostSplits = 8;  // thread blocks of a cluster

template <class T, int Groups, int Tokens, int Blocks>
void launch(DType type, const void* w, const void* x, int k, int multiprocessors, bool overlap,
            cudaStream_t stream, FusedJob job) {
    using Sizes = DenseSizes<Groups, Tokens, Blocks>;
    const auto kernel = dense_fused_kernel<T, Groups, Tokens, Blocks>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sizes::kShared),
          "a kernel's shared memory");
    job.n_blocks = blocks_for(job.w.n, Sizes::kRows);
    job.m_tiles = blocks_for(job.rows, Tokens);
    // Where tiles are few, K is split until five of six places for thread blocks are taken: more was measured
    // to gain nothing, and clusters do not fill every place.
    const int tiles = job.n_blocks * job.m_tiles, places = multiprocessors * Blocks;
    job.splits = std::clamp(places * 5 / 6 / tiles, 1, std::min(kMostSplits, (job.w.k_tiles + 1) / 2));
    job.direct = job.splits == 1 && !job.out_fp32;
    const cuuint64_t n = job.w.n, columns = k, rows = job.rows;
    const DenseMaps maps{make_map<2>(map_type(type), w, {columns, n}, {columns * 2}, {64, Sizes::kRows},
                                     CU_TENSOR_MAP_SWIZZLE_128B),
                         make_map<2>(map_type(type), x, {columns, rows}, {columns * 2}, {64, Tokens},
                                     CU_TENSOR_MAP_SWIZZLE_128B)};
    launch_clusters(kernel, (job.direct ? std::min(tiles, places) : tiles) * job.splits, Sizes::kThreads,
                    Sizes::kShared, job.splits, overlap, stream, "launching dense_fused", maps, job);
}

}  // namespace

bool dense_fused_fits(DType type, const void* w, int k, const void* x) {
    // The copy engine wants rows of 16 bytes.
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    return type != DType::F32 && k % 8 == 0 && aligned(w) && aligned(x) && w4_fused_runs();
}

void dense_fused(DType type, DType out, const void* w, int n, int k, const void* x, const float* bias,
                 void* y, int rows, int multiprocessors, bool overlap, cudaStream_t stream, bool gated) {
    if (rows == 0) return;
    if (gated && (n % 16 || out != type))
        throw std::invalid_argument("dense_fused: gates come by eights, in the type of activations");
    FusedJob job{};
    job.w.n = n;
    job.w.k = k;
    job.w.k_tiles = blocks_for(k, 64);
    job.bias = bias;
    job.y = y;
    job.out_fp32 = out == DType::F32;
    job.gated = gated;
    job.rows = rows;
    // 128 rows a thread block where that is enough for every multiprocessor.
    const bool large = blocks_for(n, 128) >= multiprocessors;
    with_half_type(type, [&]<class T>() {
        const auto run = [&]<int Groups, int Tokens, int Blocks>() {
            launch<T, Groups, Tokens, Blocks>(type, w, x, k, multiprocessors, overlap, stream, job);
        };
        if (rows <= 8) return large ? run.template operator()<2, 8, 2>() : run.template operator()<1, 8, 3>();
        if (rows <= 16)
            return large ? run.template operator()<2, 16, 2>() : run.template operator()<1, 16, 3>();
        if (rows <= 32)
            return large ? run.template operator()<2, 32, 2>() : run.template operator()<1, 32, 2>();
        large ? run.template operator()<2, 64, 2>() : run.template operator()<1, 64, 2>();
    });
}

}  // namespace turbomill::cuda
