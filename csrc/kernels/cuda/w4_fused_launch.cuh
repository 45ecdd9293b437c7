// The kernels of one type of activations, by plan.
#pragma once

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "kernels/cuda/error.h"
#include "kernels/cuda/w4_fused.cuh"

namespace turbomill::cuda {

template <class T, int Groups, int Tokens, int Blocks, bool Whole, bool Striped>
void launch_fused_kernel(const FusedMaps& maps, const FusedJob& job, int multiprocessors, bool overlap,
                         cudaStream_t stream) {
    using Sizes = FusedSizes<Groups, Tokens, Blocks, Whole>;
    const auto kernel = fused_kernel<T, Groups, Tokens, Blocks, Whole, Striped>;
    static std::atomic<uint64_t> prepared{0};  // devices, by number
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (!(prepared.load() >> device % 64 & 1)) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sizes::kShared),
              "a kernel's shared memory");
        prepared |= uint64_t(1) << device % 64;
    }
    const int tiles = job.n_blocks * job.m_tiles;
    cudaLaunchConfig_t config{};
    config.gridDim = Striped      ? blocks_for(tiles * job.stages, job.share)
                     : job.direct ? std::min(tiles, multiprocessors * Blocks)
                                  : tiles * job.splits;
    config.blockDim = Sizes::kThreads;
    config.dynamicSmemBytes = Sizes::kShared;
    config.stream = stream;
    cudaLaunchAttribute attributes[2];
    if (!Striped && !job.direct) {
        cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = unsigned(job.splits);
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    if (overlap) {
        cudaLaunchAttribute& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    config.attrs = attributes;
    check(cudaLaunchKernelEx(&config, kernel, maps, job), "launching w4_fused");
}

template <class T>
bool launch_fused(const W4Plan& plan, bool whole, const FusedMaps& maps, const FusedJob& job,
                  int multiprocessors, bool overlap, cudaStream_t stream) {
    const auto launch_if = [&]<size_t I, bool Whole, bool Striped>() {
        constexpr W4Kernel kKernel = kW4Kernels[I];
        if constexpr (!Striped || w4_stripes(kKernel)) {
            if (!(plan.kernel == kKernel) || whole != Whole || bool(plan.stripes) != Striped) return false;
            launch_fused_kernel<T, kKernel.warpgroups, kKernel.tokens, kKernel.blocks, Whole, Striped>(
                maps, job, multiprocessors, overlap, stream);
            return true;
        }
        return false;
    };
    const auto launch_either = [&]<size_t I, bool Striped>() {
        return launch_if.template operator()<I, true, Striped>() ||
               launch_if.template operator()<I, false, Striped>();
    };
    return [&]<size_t... I>(std::index_sequence<I...>) {
        return ((launch_either.template operator()<I, true>() ||
                 launch_either.template operator()<I, false>()) ||
                ...);
    }(std::make_index_sequence<std::size(kW4Kernels)>());
}

}  // namespace turbomill::cuda
