// A step's small inputs: tokens, positions, block tables, attention's work and sampling parameters, staged in
// pinned memory and sent with one copy. Where they lie on the device depends on the numbers of rows, slices,
// tiles and samples alone, so that a recorded step finds its successors' inputs in the same places.
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
    // `spare_slot`: where padding's samples go.
    StepInputs(const EngineConfig& config, TilePlanner planner, int spare_slot);

    // Lays the batch out and queues its copy. All but the latest step must be complete. `padding` rows follow
    // those of the batch, which then holds decodes that all want a token: they have no keys, are not cached,
    // and their samples are nobody's.
    void send(const BatchData& batch, int padding, cudaStream_t stream);

    int tokens = 0;               // rows of the step
    std::vector<int> first_rows;  // slice -> its first row
    std::vector<int> sampled;     // slices that want a token, in order
    bool wants_logprobs = false;  // some of them also logprobs
    int sample_count = 0;         // rows that are sampled: those, and padding
    int decode_tiles = 0, prompt_tiles = 0;
    const std::vector<int>& prompt_launches() const { return planner_.prompt_launches; }
    // Of attention_decode: slices, and rows of the longest slice.
    int decode_entries = 0, decode_rows = 0;

    // attention_decode's work for layers of one window (kNoWindow: all keys).
    struct DecodeWork {
        const DecodeRange* ranges;
        const DecodeEntry* entries;
        int range_count;
    };
    DecodeWork decode_work(int window) const;

    // Device views, valid until the next send(); row i of a step is token i.
    const int* ids() const { return at<int>(ids_); }              // [T]; -1 - slot: the slot's last sample
    const int* positions() const { return at<int>(positions_); }  // [T]
    const int* row_slice() const { return at<int>(row_slice_); }  // [T]; -1: padding
    const SliceInfo* slices() const { return at<SliceInfo>(slices_); }
    const int* blocks() const { return at<int>(blocks_); }
    const QueryTile* decodes() const { return at<QueryTile>(tiles_); }
    const QueryTile* prompts() const { return decodes() + decode_tiles; }
    const int* sampled_rows() const { return at<int>(sampled_rows_); }  // [sample_count]
    const SampleInfo* samples() const { return at<SampleInfo>(samples_); }

  private:
    template <class T>
    const T* at(size_t offset) const {
        return reinterpret_cast<const T*>(device_.as<uint8_t>() + offset);
    }

    TilePlanner planner_;
    size_t capacity_;
    DeviceMemory device_;
    PinnedMemory host_[2];  // of this step and of the one before, whose copy may not have begun
    int side_ = 0;
    const int spare_slot_;
    size_t ids_ = 0, positions_ = 0, row_slice_ = 0, slices_ = 0, tiles_ = 0, sampled_rows_ = 0, samples_ = 0,
           blocks_ = 0;
    struct PlanPlaces {
        size_t ranges, entries;
    };
    std::vector<PlanPlaces> plans_;  // of the planner's decode_plans
};

}  // namespace turbomill::cuda
