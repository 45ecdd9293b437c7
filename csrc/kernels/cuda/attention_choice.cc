#include "kernels/cuda/attention_choice.h"

#include <algorithm>

#include "core/types.h"

namespace turbomill::cuda {

std::vector<CacheView> cache_views(const CacheLayout& layout, const EngineConfig& config) {
    std::vector<CacheView> views;
    for (int i = 0; i < int(layout.layers.size()); ++i) {
        const LayerLayout& l = layout.layers[i];
        views.push_back({nullptr,
                         int64_t(layout.block_bytes),
                         {int(l.row_bytes[0]), int(l.row_bytes[1])},
                         {int(l.head_bytes[0]), int(l.head_bytes[1])},
                         int(l.param_bytes),
                         config.keeps_16bit(i) ? 0 : config.quant_policy,
                         {l.formats.key, l.formats.value},
                         layout.dtype,
                         layout.heads,
                         layout.head_dim,
                         layout.block_len,
                         l.rotated,
                         nullptr});
    }
    return views;
}

CacheView unpacked_view(CacheView cache, DType type) {
    for (int value = 0; value < 2; ++value) {
        cache.row_bytes[value] = cache.head_dim * int(dtype_bytes(type));
        cache.head_bytes[value] = kUnpackedBlock * cache.row_bytes[value];
        cache.format[value] = KvFormat::Plain;
    }
    cache.block_bytes = int64_t(cache.heads) * (cache.head_bytes[0] + cache.head_bytes[1]);
    cache.param_bytes = 0;
    cache.policy = 0;
    cache.dtype = type;
    cache.block_len = kUnpackedBlock;
    return cache;
}

AttentionKernels choose_attention(DType type, const std::vector<CacheView>& layers, int num_heads) {
    const auto all = [&](const auto& fits) { return std::all_of(layers.begin(), layers.end(), fits); };
    const bool tensor = all([&](const CacheView& c) { return attention_tensor_fits(type, c); });
    const bool prompt = all([&](const CacheView& c) { return attention_prompt_fits(type, c, num_heads); });
    // Slices of more rows than attention_decode takes need a kernel, too.
    if ((tensor || prompt) && all([&](const CacheView& c) { return attention_decode_fits(type, c); }))
        return AttentionKernels::Decode;
    return tensor ? AttentionKernels::Tensor : AttentionKernels::Any;
}

PromptTiles choose_prompt_tiles(DType type, const std::vector<CacheView>& layers, const ModelConfig& model,
                                const EngineConfig& config) {
    for (const CacheView& c : layers)
        if (!attention_prompt_fits(type, c, model.num_heads)) return {};
    const int tokens = std::max(config.session_len, config.max_step_tokens());
    return {prompt_tile_tokens(model.group()) * model.group(),
            planned_policy(layers) ? ceil_div(tokens, kUnpackedBlock) : 0};
}

int planned_policy(const std::vector<CacheView>& layers) {
    for (const CacheView& c : layers)
        if (c.quantized()) return c.policy;
    return 0;
}

Scores layer_scores(const ModelConfig& model, int layer) {
    return {model.score_scale(), model.attention_softcap,
            model.window(layer) ? model.window(layer) : kNoWindow};
}

}  // namespace turbomill::cuda
