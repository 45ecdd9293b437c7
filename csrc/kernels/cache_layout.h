// Bytes and offsets of the paged KV cache, the same on every backend: blocks of P tokens, all layers of a
// block together.
#pragma once

#include <cstddef>

#include "core/config.h"
#include "core/types.h"

namespace turbomill {

// Inside one block, per layer: K [Nkv, P, row], V [Nkv, P, row], and for quantized caches the fp16 parameters
// (scale, zero) of K [Nkv, P, 2] and V [Nkv, P, 2].
struct CacheLayout {
    CacheLayout(const ModelConfig& model, const EngineConfig& config);

    int bits;     // 16 or 32: plain; 8 or 4: codes
    DType dtype;  // of a plain cache
    int heads, head_dim, block_len;
    size_t row_bytes;    // one token of one head
    size_t head_bytes;   // P rows
    size_t param_bytes;  // P parameter pairs of one head, 0 when plain
    size_t layer_bytes;
    size_t block_bytes;

    bool quantized() const { return bits < 16; }
};

}  // namespace turbomill
