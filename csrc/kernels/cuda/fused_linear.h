// The fused kernels for packed weights on sm_90a, as the code that chooses among them sees them.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

// A product as the kernels see it: blocks of 64 * warpgroups rows of N by tiles of tokens, each block and
// tile by one thread block, or, when K is split, by one cluster of `splits` thread blocks.
struct FusedJob {
    PackedView w;       // whose `zeros` are the minima, if there are any
    const float* bias;  // [N] or null
    void* y;            // [rows, N]
    bool out_fp32;
    bool gated;  // y [rows, N/2] = silu(gate) * up of the product, whose columns interleave them by eights
    int rows;
    int n_blocks, m_tiles;
    int splits;
    bool direct;  // 16-bit results, no sums to exchange: a thread block takes several tiles in turn
    bool minima;
};

// What the copy engine knows of the operands. A stage of a kernel's ring takes one box of codes, scales and
// zeros each, and one of x for each of its tiles of K; what lies outside of a tensor arrives as zeros.
struct FusedMaps {
    CUtensorMap x;              // [rows, K], boxes of [tokens, 64], swizzled
    CUtensorMap codes;          // boxes of [warpgroups, the stage's tiles] tiles (CodeTile)
    CUtensorMap scales, zeros;  // [N/64, groups, 64], boxes of [warpgroups, the stage's groups, 64]
};

// `whole`: no stage has more than one group.
FusedMaps fused_maps(int bits, DType type, const void* x, int rows, const PackedView& w, FusedKernel kernel,
                     bool whole);

// Tiles of 64 of K in a stage of a kernel's ring.
constexpr int fused_stage_tiles(FusedKernel kernel) {
    return kernel.tokens <= 64 ? 2 : 1;
}

// Launches the kernel for codes of `Bits` bits, T and `plan`; false when there is none. `whole`: no stage has
// more than one group.
template <int Bits, class T>
bool launch_fused(const FusedPlan& plan, bool whole, const FusedMaps& maps, const FusedJob& job,
                  int multiprocessors, bool overlap, cudaStream_t stream);

}  // namespace turbomill::cuda
