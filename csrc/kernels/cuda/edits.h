// The logit edits of a step's samples on the device. Only steps that have some send any.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "engine/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/memory.h"

namespace turbomill::cuda {

class EditInputs {
  public:
    // Lays out the edits of the slices `sampled`, whose rows of logits are in this order, and queues their
    // copy. All but the latest step must be complete.
    void send(const BatchData& batch, const std::vector<int>& sampled, cudaStream_t stream);

    // Valid until the next send().
    const EditsView& view() const { return view_; }

  private:
    EditsView view_{};
    DeviceMemory device_;
    std::vector<PinnedMemory> host_;  // of this step and of the one before, whose copy may not have begun
    size_t host_bytes_[2] = {0, 0};
    int side_ = 0;
};

}  // namespace turbomill::cuda
