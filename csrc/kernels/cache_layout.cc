#include "kernels/cache_layout.h"

#include <algorithm>

namespace turbomill {

CacheLayout::CacheLayout(const ModelConfig& model, const EngineConfig& config)
    : dtype(parse_dtype(config.cache_dtype)),
      heads(model.num_kv_heads),
      head_dim(model.head_dim),
      block_len(config.block_len),
      block_bytes(0) {
    for (int i = 0; i < model.num_layers; ++i) {
        LayerLayout layer{};
        layer.formats = kv_formats(config.keeps_16bit(i) ? 0 : config.quant_policy);
        layer.rotated = config.kv_rotation && !(config.quant_policy && config.keeps_16bit(i));
        layer.offset = block_bytes;
        for (int value = 0; value < 2; ++value) {
            const KvFormat format = layer.formats[value];
            layer.row_bytes[value] = is_quantized(format) ? size_t(head_dim) * code_bits(format) / 8
                                                          : head_dim * dtype_bytes(dtype);
            layer.head_bytes[value] = layer.row_bytes[value] * block_len;
        }
        layer.param_bytes = layer.formats.quantized() ? size_t(block_len) * 4 : 0;
        layer.bytes = size_t(heads) * (layer.head_bytes[0] + layer.head_bytes[1] + 2 * layer.param_bytes);
        block_bytes += layer.bytes;
        layers.push_back(layer);
    }
}

bool CacheLayout::rotates() const {
    return std::any_of(layers.begin(), layers.end(), [](const LayerLayout& l) { return l.rotated; });
}

}  // namespace turbomill
