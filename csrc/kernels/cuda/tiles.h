// Cuts a step's attention into tiles: blocks of the attention kernels.
#pragma once

#include <vector>

#include "core/config.h"
#include "engine/batch.h"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

class TilePlanner {
  public:
    // `tensor`: for attention_tensor; otherwise for attention_any, where every tile has kQueryRows rows.
    TilePlanner(const ModelConfig& model, bool tensor, int multiprocessors);

    // Fills the lists below.
    void plan(const BatchData& batch);

    std::vector<QueryTile> decodes;  // of kQueryRows rows, their keys cut where that fills the GPU
    std::vector<QueryTile> prompts;  // of kPromptRows rows

    // Bounds for any step of `tokens` tokens in `slices` slices.
    size_t most_tiles(size_t slices, size_t tokens) const;
    size_t slots() const { return slots_; }  // of the workspace where parts meet

  private:
    const int group_, kv_heads_;
    const bool tensor_;
    const int target_;  // tiles for each KV head that fill the GPU
    const size_t slots_;
};

}  // namespace turbomill::cuda
