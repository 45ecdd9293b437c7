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

// How a weight lies in device memory. Dense: in the activations' type, expanded if the store has codes that
// no kernel reads: 4 bits with minima or of an embedding, an order of inputs, experts' 8 bits.
enum class Kept { Dense, W4, W8 };
Kept kept(const Linear& w);
Kept kept_expert(const Linear& w);

class DeviceWeights {
  public:
    // Dense weights of another type than `type` are converted on the way. Throws CudaError when the device
    // has no room, std::runtime_error for a weight that no kernel reads.
    DeviceWeights(const Weights& weights, DType type, cudaStream_t stream);

    // Frees the copies.
    void release() { memory_ = {}; }
    bool held() const { return bytes() > 0; }
    size_t bytes() const { return memory_.bytes(); }
    // Of a dense weight, codes, scales, zeros or a vector.
    const void* at(const void* host) const;
    const float* at(const std::vector<float>& vector) const {
        return vector.empty() ? nullptr : static_cast<const float*>(at(vector.data()));
    }
    // Elements [N, K] of the largest W4 weight that the fused kernels do not take, and of the largest W8 one.
    size_t largest_unfused() const { return largest_unfused_; }
    size_t largest_w8() const { return largest_w8_; }

  private:
    DeviceMemory memory_;
    std::unordered_map<const void*, const void*> addresses_;
    size_t largest_unfused_ = 0, largest_w8_ = 0;
};

}  // namespace turbomill::cuda
