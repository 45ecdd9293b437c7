// A step's small inputs: tokens, positions, block tables, attention tiles and sampling parameters, staged in
// pinned memory and sent with one copy.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "core/config.h"
#include "engine/batch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/tiles.h"

namespace turbomill::cuda {

class StepInputs {
  public:
    StepInputs(const EngineConfig& config, TilePlanner planner);

    // Lays the batch out and queues its copy. The previous step must be complete.
    void send(const BatchData& batch, cudaStream_t stream);

    int tokens = 0;               // rows of the step
    std::vector<int> first_rows;  // slice -> its first row
    std::vector<int> sampled;     // slices that want a token, in order
    int decode_tiles = 0, prompt_tiles = 0;

    // Device views, valid until the next send(); row i of a step is token i.
    const int* ids() const { return at<int>(ids_); }              // [T]; -1 - slot: the slot's last sample
    const int* positions() const { return at<int>(positions_); }  // [T]
    const int* row_slice() const { return at<int>(row_slice_); }  // [T]
    const SliceInfo* slices() const { return at<SliceInfo>(slices_); }
    const int* blocks() const { return at<int>(blocks_); }
    const QueryTile* decodes() const { return at<QueryTile>(tiles_); }
    const QueryTile* prompts() const { return decodes() + decode_tiles; }
    const int* sampled_rows() const { return at<int>(sampled_rows_); }  // [sampled]
    const SampleInfo* samples() const { return at<SampleInfo>(samples_); }

  private:
    template <class T>
    const T* at(size_t offset) const {
        return reinterpret_cast<const T*>(device_.as<uint8_t>() + offset);
    }

    TilePlanner planner_;
    size_t capacity_;
    DeviceMemory device_;
    PinnedMemory host_;
    size_t ids_ = 0, positions_ = 0, row_slice_ = 0, slices_ = 0, blocks_ = 0, tiles_ = 0, sampled_rows_ = 0,
           samples_ = 0;
};

}  // namespace turbomill::cuda
