// The cache's rotation: heads times an orthonormal Walsh-Hadamard matrix, block by block of the largest power
// of two in D. It is symmetric: its own inverse.
#pragma once

#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

// Rows of N * Lanes elements over Lanes neighbouring lanes, N each, are transformed, but not scaled. All
// lanes of `mask` call.
template <int N, int Lanes>
__device__ inline void hadamard_lanes(float (&v)[N], unsigned mask) {
#pragma unroll
    for (int width = 1; width < N; width *= 2)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if ((i & width) == 0) {
                const float a = v[i], b = v[i + width];
                v[i] = a + b;
                v[i + width] = a - b;
            }
#pragma unroll
    for (int width = 1; width < Lanes; width *= 2) {
        const bool upper = threadIdx.x & width;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = __shfl_xor_sync(mask, v[i], width);
            v[i] = upper ? other - v[i] : v[i] + other;
        }
    }
}

// row [D] in shared memory, by one warp, scaled; `block`: rotation_block(D).
__device__ inline void hadamard_row(float* row, int d, int block) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    for (int width = 1; width < block; width *= 2) {
        for (int i = lane; i < d / 2; i += 32) {
            const int at = i / width * 2 * width + i % width;
            const float a = row[at], b = row[at + width];
            row[at] = a + b;
            row[at + width] = a - b;
        }
        __syncwarp();
    }
    const float unit = 1.f / sqrtf(float(block));
    for (int i = lane; i < d; i += 32) row[i] *= unit;
    __syncwarp();
}

}  // namespace turbomill::cuda
