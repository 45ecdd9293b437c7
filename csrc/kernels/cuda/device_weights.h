// A store's tensors in device memory: straight copies, made once. Looked up by their address in host memory,
// by which the decoder names them.
#pragma once

#include <cuda_runtime_api.h>

#include <unordered_map>

#include "kernels/cuda/memory.h"
#include "store/weights.h"

namespace turbomill::cuda {

// The type activations have: the embedding's, when it is 16 bits wide or no linear is quantized; otherwise
// that of the first quantized linear's scales (the 4-bit kernels need 16-bit activations).
DType activation_type(const Weights& weights);

class DeviceWeights {
  public:
    // Dense weights of another type than `type` are converted on the way. Throws CudaError when the device
    // has no room, std::runtime_error for a weight that no kernel reads.
    DeviceWeights(const Weights& weights, DType type, cudaStream_t stream);

    // Frees the copies.
    void release() { memory_ = {}; }
    bool held() const { return memory_.bytes() > 0; }
    // Of a dense weight, codes, scales, zeros or a vector.
    const void* at(const void* host) const;
    const float* at(const std::vector<float>& vector) const {
        return vector.empty() ? nullptr : static_cast<const float*>(at(vector.data()));
    }
    // Elements [N, K] of the largest quantized weight that the fused kernels do not take.
    size_t largest_unfused() const { return largest_unfused_; }

  private:
    DeviceMemory memory_;
    std::unordered_map<const void*, const void*> addresses_;
    size_t largest_unfused_ = 0;
};

}  // namespace turbomill::cuda
