// The kernels of one type of activations, by plan.
#pragma once

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "kernels/cuda/error.h"
#include "kernels/cuda/fused_linear.cuh"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {

template <class T, int Bits, int Groups, int Tokens, int Blocks, bool Whole, bool Halved>
void launch_fused_kernel(const FusedMaps& maps, const FusedJob& job, int multiprocessors, bool overlap,
                         cudaStream_t stream) {
    using Sizes = FusedSizes<Bits, Groups, Tokens, Blocks, Whole>;
    const auto kernel = fused_kernel<T, Bits, Groups, Tokens, Blocks, Whole, Halved>;
    static std::atomic<uint64_t> prepared{0};  // devices, by number
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (!(prepared.load() >> device % 64 & 1)) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sizes::kShared),
              "a kernel's shared memory");
        prepared |= uint64_t(1) << device % 64;
    }
    const int tiles = job.n_blocks * job.m_tiles;
    const int team = Halved ? 2 : job.splits;  // thread blocks of a tile
    const int blocks = (job.direct ? std::min(tiles, multiprocessors * Blocks / team) : tiles) * team;
    launch_clusters(kernel, blocks, Sizes::kThreads, Sizes::kShared, job.splits, overlap, stream,
                    "launching a fused linear", maps, job);
}

template <int Bits, class T>
bool launch_fused(const FusedPlan& plan, bool whole, const FusedMaps& maps, const FusedJob& job,
                  int multiprocessors, bool overlap, cudaStream_t stream) {
    const auto launch_if = [&]<size_t I, bool Whole>() {
        constexpr FusedKernel kKernel = fused_kernels(Bits)[I];
        if (!(plan.kernel == kKernel) || whole != Whole) return false;
        launch_fused_kernel<T, Bits, kKernel.block_groups(), kKernel.tokens, kKernel.blocks, Whole,
                            kKernel.halved()>(maps, job, multiprocessors, overlap, stream);
        return true;
    };
    return [&]<size_t... I>(std::index_sequence<I...>) {
        return ((launch_if.template operator()<I, true>() || launch_if.template operator()<I, false>()) ||
                ...);
    }(std::make_index_sequence<fused_kernels(Bits).size()>());
}

}  // namespace turbomill::cuda
