// Which attention kernels a model with its cache gets, and how the cache looks to them.
#pragma once

#include "core/config.h"
#include "kernels/cache_layout.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tiles.h"

namespace turbomill::cuda {

CacheView cache_view(const CacheLayout& layout, uint8_t* data);
// A quantized cache's blocks of one layer, unpacked to `type`; without data yet.
CacheView unpacked_view(CacheView cache, DType type);

// For decodes, and for prompts where the next function has none.
AttentionKernels choose_attention(DType type, const CacheView& cache, int num_heads);
// Without rows where attention_prompt does not fit.
PromptTiles choose_prompt_tiles(DType type, const CacheView& cache, const ModelConfig& model,
                                const EngineConfig& config);

// What the scores of a layer go through.
Scores layer_scores(const ModelConfig& model, int layer);

}  // namespace turbomill::cuda
