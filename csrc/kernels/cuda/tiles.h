// Cuts a step's attention into work for the attention kernels.
#pragma once

#include <vector>

#include "core/config.h"
#include "engine/batch.h"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

enum class AttentionKernels {
    Any,     // attention_any: every tile has kQueryRows rows
    Tensor,  // attention_tensor for decodes and prompts
    Decode,  // attention_decode; attention_tensor for prompts where PromptTiles has no rows
};

// How prompts are cut for attention_prompt. Without rows, they are cut as AttentionKernels says.
struct PromptTiles {
    int rows = 0;             // of a tile
    int unpacked_blocks = 0;  // of the workspace that a quantized cache is unpacked to, else 0
};

// attention_decode's work, for layers of one window.
struct DecodePlan {
    int window;
    std::vector<DecodeEntry> entries;  // its slices, then the number of all units
    std::vector<DecodeRange> ranges;   // what its blocks do
};

class TilePlanner {
  public:
    // `policy`: quant_policy of the cache.
    TilePlanner(const ModelConfig& model, AttentionKernels kernels, int policy, int multiprocessors,
                PromptTiles prompt_tiles = {});

    // Fills the lists below. `padding`: entries without keys that follow the slices'.
    void plan(const BatchData& batch, int padding = 0);

    std::vector<QueryTile> decodes;  // of kQueryRows rows, their keys cut where that fills the GPU
    std::vector<QueryTile> prompts;  // of kPromptRows rows, or as PromptTiles says
    // Of attention_prompt: where each of its launches' tiles end. They are longest first, and their slices'
    // keys fit the workspace.
    std::vector<int> prompt_launches;
    std::vector<DecodePlan> decode_plans;  // one for each window that layers have
    int most_rows = 0;                     // of their slices

    // Bounds for any step of `tokens` tokens in `slices` slices.
    size_t most_tiles(size_t slices, size_t tokens) const;
    size_t most_ranges() const { return size_t(kMostDecodeRanges) * multiprocessors_; }
    size_t slots() const { return slots_; }  // of the workspace where attention_tensor's parts meet

  private:
    void cut_prompt(int slice, int rows, int context);
    void end_prompt_launch();
    void cut_ranges(DecodePlan& plan) const;
    int largest_part(const std::vector<DecodeEntry>& entries, int blocks, int share) const;
    void cut_pairs(DecodePlan& plan, int most, int units) const;
    void cut_line(DecodePlan& plan, int share, int units, int total) const;

    const int group_, kv_heads_, head_dim_;
    const AttentionKernels kernels_;
    const int policy_, multiprocessors_;
    const PromptTiles prompt_tiles_;
    int unpacked_ = 0;       // blocks of the workspace that the launch being planned uses
    const int whole_units_;  // that attention_decode's warps take at once
    const int target_;       // tiles for each KV head that fill the GPU
    const size_t slots_;
};

}  // namespace turbomill::cuda
