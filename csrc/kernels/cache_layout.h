// Bytes and offsets of the paged KV cache, the same on every backend: blocks of P tokens, all layers of a
// block together.
#pragma once

#include <cstddef>
#include <vector>

#include "core/config.h"
#include "core/kv_scheme.h"
#include "core/types.h"

namespace turbomill {

// One layer's part of a block: K [Nkv, P, row], V [Nkv, P, row], and where rows are codes the fp16 parameters
// (scale, zero) of K [Nkv, P, 2] and V [Nkv, P, 2].
struct LayerLayout {
    KvFormats formats;
    bool rotated;          // K, less its centre, and V are stored rotated
    size_t offset;         // in a block
    size_t row_bytes[2];   // one token of one head, K and V
    size_t head_bytes[2];  // P rows
    size_t param_bytes;    // P parameter pairs of one head, 0 when plain
    size_t bytes;

    // Of the rows of K (0) or V (1) of a head, and of their parameters, within the layer's part.
    size_t rows_at(int value, int head, int heads) const {
        return value * heads * head_bytes[0] + head * head_bytes[value];
    }
    size_t params_at(int value, int head, int heads) const {
        return heads * (head_bytes[0] + head_bytes[1]) + (size_t(value) * heads + head) * param_bytes;
    }
};

struct CacheLayout {
    CacheLayout(const ModelConfig& model, const EngineConfig& config);

    DType dtype;  // of plain rows
    int heads, head_dim, block_len;
    std::vector<LayerLayout> layers;
    size_t block_bytes;

    bool rotates() const;  // some layer does
};

}  // namespace turbomill
