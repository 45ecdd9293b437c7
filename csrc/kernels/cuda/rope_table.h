// Cosines and sines of every position of a session.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/cuda/memory.h"
#include "kernels/key_centres.h"

namespace turbomill::cuda {

struct RopeTable {
    // Both are multiplied by `factor`. Without frequencies: an empty table.
    RopeTable(const std::vector<float>& inv_freq, int positions, float factor, cudaStream_t stream);

    int half;               // D_rot/2
    DeviceMemory cos, sin;  // [positions, D_rot/2]

    MeanRotation mean(cudaStream_t stream) const;
};

}  // namespace turbomill::cuda
