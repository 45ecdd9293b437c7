// The paged KV cache on the CPU: blocks of P tokens, all layers of a block together.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "core/config.h"
#include "core/types.h"

namespace turbomill::cpu {

// Bytes and offsets inside one block. Per layer: K [Nkv, P, row], V [Nkv, P, row], and for quantized caches
// the fp16 parameters (scale, zero) of K [Nkv, P, 2] and V [Nkv, P, 2].
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

class KvCache {
  public:
    // Reserves address space for all blocks; pages become resident when first written. Throws
    // std::runtime_error naming the bytes.
    KvCache(const ModelConfig& model, const EngineConfig& config);

    const CacheLayout layout;

    // First row of K (0) or V (1) of a head, and its parameters.
    uint8_t* rows(int block, int layer, int value, int head) const;
    uint16_t* params(int block, int layer, int value, int head) const;

  private:
    struct Unmap {
        size_t bytes;
        void operator()(uint8_t* data) const;
    };
    std::unique_ptr<uint8_t, Unmap> data_;
};

}  // namespace turbomill::cpu
