// The fused W4A16 kernels for experts, as the code that launches them sees them.
#pragma once

#include "kernels/cuda/fused_linear.h"

namespace turbomill::cuda {

// The kernels of w4_fused whose tiles experts use: with so many tokens.
inline constexpr FusedKernel kGroupedKernels[] = {{2, 8, 2},  {2, 16, 2},  {2, 32, 2},
                                                  {2, 64, 2}, {2, 128, 1}, {2, 256, 1}};

// `maps` and `job` of all experts as one weight, whose rows of N lie expert after expert; job.w.n and
// job.n_blocks are of one.
struct GroupedJob {
    FusedJob fused;
    const int* offsets;  // [E + 1]: the expert's rows of x and y
    int experts;
};

template <class T>
bool launch_grouped(FusedKernel kernel, bool whole, const FusedMaps& maps, const GroupedJob& job,
                    int multiprocessors, cudaStream_t stream);

}  // namespace turbomill::cuda
