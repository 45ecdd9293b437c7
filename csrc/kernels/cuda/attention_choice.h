// Which attention kernels a model with its cache gets, and how the cache looks to them.
#pragma once

#include <vector>

#include "core/config.h"
#include "kernels/cache_layout.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tiles.h"

namespace turbomill::cuda {

// Every layer's part of the cache; without data yet.
std::vector<CacheView> cache_views(const CacheLayout& layout, const EngineConfig& config);
// A quantized cache's blocks of one layer, unpacked to `type`; without data yet.
CacheView unpacked_view(CacheView cache, DType type);

// For decodes, and for prompts where the next function has none.
AttentionKernels choose_attention(DType type, const std::vector<CacheView>& layers, int num_heads);
// Without rows where attention_prompt does not fit.
PromptTiles choose_prompt_tiles(DType type, const std::vector<CacheView>& layers, const ModelConfig& model,
                                const EngineConfig& config);
// The policy that a step's work is cut for: that of the layers that are quantized, if some are.
int planned_policy(const std::vector<CacheView>& layers);

// What the scores of a layer go through.
Scores layer_scores(const ModelConfig& model, int layer);

}  // namespace turbomill::cuda
