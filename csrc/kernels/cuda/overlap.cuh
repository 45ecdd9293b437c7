// Programmatic dependent launch (sm_90): a kernel may start while the one before it in the stream still runs,
// and does what needs nothing of it until it waits. Elsewhere all of this is an ordinary launch.
//
// The rule that makes it safe: every kernel launched by launch_overlapped() calls wait_for_previous(), in
// each of its threads that touches memory, before it reads what an earlier kernel of the step writes and
// before it writes anything. What a kernel reads ahead of that was there when the step began.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/error.h"

namespace turbomill::cuda {

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as every block of this one has come here.
__device__ inline void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether launches of this thread overlap: the GPU can, and there is no NoOverlap.
bool overlaps_launches();

template <class... Parameters, class... Arguments>
void launch_overlapped(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
                       cudaStream_t stream, const char* what, Arguments... arguments) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlaps_launches() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), what);
}

// Clusters of `size` thread blocks each. `overlap`: whether the launch may overlap with the one before.
template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), unsigned grid, int threads, size_t shared, unsigned size,
                     bool overlap, cudaStream_t stream, const char* what, const Arguments&... arguments) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = size;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlap ? 2 : 1;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace turbomill::cuda
