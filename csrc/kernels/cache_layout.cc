#include "kernels/cache_layout.h"

namespace turbomill {

CacheLayout::CacheLayout(const ModelConfig& model, const EngineConfig& config)
    : bits(config.quant_policy ? config.quant_policy : 16),
      dtype(parse_dtype(config.cache_dtype)),
      heads(model.num_kv_heads),
      head_dim(model.head_dim),
      block_len(config.block_len) {
    if (!config.quant_policy) bits = int(dtype_bytes(dtype)) * 8;
    row_bytes = size_t(head_dim) * bits / 8;
    head_bytes = row_bytes * block_len;
    param_bytes = quantized() ? size_t(block_len) * 4 : 0;
    layer_bytes = 2 * size_t(heads) * (head_bytes + param_bytes);
    block_bytes = layer_bytes * model.num_layers;
}

}  // namespace turbomill
