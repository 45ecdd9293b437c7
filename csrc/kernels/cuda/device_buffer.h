// The backend's activations.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/memory.h"

namespace turbomill::cuda {

class DeviceBuffer : public Buffer {
  public:
    DeviceBuffer(size_t elements, DType type, bool residual)
        : residual_(residual),
          memory_(elements * dtype_bytes(type), "an activation buffer",
                  "lower max_prefill_token_num or cache_max_entry_count") {}
    void* data() override { return memory_.as(); }
    // Which is fp32, whatever the type of activations is.
    bool residual() const { return residual_; }

  private:
    bool residual_;
    DeviceMemory memory_;
};

}  // namespace turbomill::cuda
