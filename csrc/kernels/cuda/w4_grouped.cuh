// The fused kernels (fused_linear.cuh) for 4-bit weights over experts: the same ring, products and stores,
// with tiles whose rows of tokens are read from memory, so that the host need not know who was chosen. Thread
// blocks fill the GPU once and take tiles in turn.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/cuda/fused_linear.cuh"
#include "kernels/cuda/grouped_work.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/w4_grouped.h"

namespace turbomill::cuda {

// The copying thread.
template <int Groups, int Tokens, bool Whole, class Sizes>
__device__ inline void grouped_copies(const FusedRing<Groups, Sizes>& ring, const FusedMaps& maps,
                                      const GroupedJob& job) {
    constexpr int kTiles = Sizes::kTiles;
    const PackedView& w = job.fused.w;
    const FusedCopier<Groups, Whole, Sizes> copy(ring, maps, w);
    const int stage_groups = fused_stage_groups<Whole, Sizes>(w), n_tiles = (w.n + 63) / 64;
    const int period = fused_period<Whole, Sizes>(w);
    int stage = 0;
    unsigned parity = 1;  // of a stage that nobody has used yet
    for (GroupedWork<Tokens> work(job); work.next();) {
        const int n = work.expert * n_tiles + work.place.x * Groups;
        const int row = work.first_row + work.place.y * Tokens;
        int group = 0, left = period;
        for (int k = 0; k < w.k_tiles; k += kTiles) {
            barrier_wait(ring.empty + 8 * stage, parity);
            copy.weights(k, group, n, stage);
            copy.input(k, row, stage);
            if (--left == 0) group += stage_groups, left = period;
            if (++stage == Sizes::kStages) stage = 0, parity ^= 1;
        }
    }
}

template <class T, int Groups, int Tokens, int Blocks, bool Whole>
__global__ void __launch_bounds__(FusedSizes<4, Groups, Tokens, Blocks, Whole>::kThreads, Blocks)
    grouped_kernel(const __grid_constant__ FusedMaps maps, const GroupedJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Sizes = FusedSizes<4, Groups, Tokens, Blocks, Whole>;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[2 * Sizes::kStages];
    uint8_t* base = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const FusedRing<Groups, Sizes> ring{shared_address(base), shared_address(barriers),
                                        shared_address(barriers + Sizes::kStages)};
    fused_begin<Groups, Sizes::kStages>(ring);
    allow_next();
    wait_for_previous();  // which wrote the offsets
    if (threadIdx.x >= 128 * Groups) {
        if constexpr (Sizes::kHandsOn) registers_down<Sizes::kCopyRegisters>();
        if (threadIdx.x == 128 * Groups) grouped_copies<Groups, Tokens, Whole>(ring, maps, job);
    } else {
        if constexpr (Sizes::kHandsOn) registers_up<Sizes::kProductRegisters>();
        using Products = std::conditional_t<Sizes::kByWarps, WarpProducts<T, Groups, Tokens, Whole, Sizes>,
                                            GroupProducts<T, Groups, Tokens, Whole, Sizes>>;
        RingReader<T, Groups, Whole, Sizes> at(ring, job.fused);
        const Products products(ring);
        const int columns = job.fused.gated ? job.fused.w.n / 2 : job.fused.w.n;
        for (GroupedWork<Tokens> work(job); work.next();) {
            float acc[Tokens / 2];
            products.run(at, 0, job.fused.w.k_tiles, acc);
            FusedJob expert = job.fused;
            expert.y = static_cast<T*>(expert.y) + int64_t(work.first_row) * columns;
            expert.rows = work.rows;
            fused_store<T, Tokens, Sizes>(base + Sizes::kRing, expert,
                                          64 * (work.place.x * Groups + int(threadIdx.x / 128)),
                                          work.place.y * Tokens, acc);
        }
    }
#endif
}

template <class T, int Groups, int Tokens, int Blocks, bool Whole>
void launch_grouped_kernel(const FusedMaps& maps, const GroupedJob& job, int multiprocessors,
                           cudaStream_t stream) {
    using Sizes = FusedSizes<4, Groups, Tokens, Blocks, Whole>;
    const auto kernel = grouped_kernel<T, Groups, Tokens, Blocks, Whole>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sizes::kShared),
          "a kernel's shared memory");
    launch_overlapped(kernel, dim3(grouped_blocks(job, Tokens, multiprocessors * Blocks)), Sizes::kThreads,
                      Sizes::kShared, stream, "grouped_w4_fused", maps, job);
}

template <class T>
bool launch_grouped(FusedKernel wanted, bool whole, const FusedMaps& maps, const GroupedJob& job,
                    int multiprocessors, cudaStream_t stream) {
    const auto launch_if = [&]<size_t I, bool Whole>() {
        constexpr FusedKernel kKernel = kGroupedKernels[I];
        if (!(wanted == kKernel) || whole != Whole) return false;
        launch_grouped_kernel<T, kKernel.warpgroups, kKernel.tokens, kKernel.blocks, Whole>(
            maps, job, multiprocessors, stream);
        return true;
    };
    return [&]<size_t... I>(std::index_sequence<I...>) {
        return ((launch_if.template operator()<I, true>() || launch_if.template operator()<I, false>()) ||
                ...);
    }(std::make_index_sequence<std::size(kGroupedKernels)>());
}

}  // namespace turbomill::cuda
