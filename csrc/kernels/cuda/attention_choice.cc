#include "kernels/cuda/attention_choice.h"

#include <algorithm>

#include "core/types.h"

namespace turbomill::cuda {

CacheView cache_view(const CacheLayout& layout, uint8_t* data) {
    return {data,
            int64_t(layout.block_bytes),
            int64_t(layout.layer_bytes),
            int(layout.row_bytes),
            int(layout.head_bytes),
            int(layout.param_bytes),
            layout.bits,
            layout.dtype,
            layout.heads,
            layout.head_dim,
            layout.block_len};
}

CacheView unpacked_view(CacheView cache, DType type) {
    cache.row_bytes = cache.head_dim * int(dtype_bytes(type));
    cache.head_bytes = kUnpackedBlock * cache.row_bytes;
    cache.block_bytes = 2 * int64_t(cache.heads) * cache.head_bytes;
    cache.layer_bytes = cache.param_bytes = 0;
    cache.bits = 16;
    cache.dtype = type;
    cache.block_len = kUnpackedBlock;
    return cache;
}

AttentionKernels choose_attention(DType type, const CacheView& cache, int num_heads) {
    const bool tensor = attention_tensor_fits(type, cache);
    // Slices of more rows than attention_decode takes need a kernel, too.
    if (attention_decode_fits(type, cache) && (tensor || attention_prompt_fits(type, cache, num_heads)))
        return AttentionKernels::Decode;
    return tensor ? AttentionKernels::Tensor : AttentionKernels::Any;
}

PromptTiles choose_prompt_tiles(DType type, const CacheView& cache, const ModelConfig& model,
                                const EngineConfig& config) {
    if (!attention_prompt_fits(type, cache, model.num_heads)) return {};
    const int tokens = std::max(config.session_len, config.max_step_tokens());
    return {prompt_tile_tokens(model.group()) * model.group(),
            cache.bits < 16 ? ceil_div(tokens, kUnpackedBlock) : 0};
}

Scores layer_scores(const ModelConfig& model, int layer) {
    return {model.score_scale(), model.attention_softcap,
            model.window(layer) ? model.window(layer) : kNoWindow};
}

}  // namespace turbomill::cuda
