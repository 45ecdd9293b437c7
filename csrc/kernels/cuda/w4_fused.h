// The fused W4A16 kernels of sm_90a, as the code that chooses among them sees them.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

// A product as the kernels see it: blocks of 64 * warpgroups rows of N by tiles of tokens, each block and
// tile by one thread block, or, when K is split, by one cluster of `splits` thread blocks.
struct FusedJob {
    W4View w;
    const float* bias;  // [N] or null
    void* y;            // [rows, N]
    bool out_fp32;
    int rows;
    int n_blocks, m_tiles;
    int splits;
    bool direct;  // 16-bit results straight from the accumulators: one thread block takes several tiles in turn
};

// Launches the kernel for T and `plan`; false when there is none.
template <class T>
bool launch_fused(const W4Plan& plan, const CUtensorMap& x, const FusedJob& job, int multiprocessors,
                  bool overlap, cudaStream_t stream);

}  // namespace turbomill::cuda
