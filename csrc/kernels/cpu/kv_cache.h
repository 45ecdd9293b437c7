// The paged KV cache in host memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "engine/batch.h"
#include "kernels/cache_layout.h"
#include "kernels/cpu/kernels.h"

namespace turbomill::cpu {

class KvCache {
  public:
    // Reserves address space for all blocks; pages become resident when first written. Throws
    // std::runtime_error naming the bytes.
    KvCache(const ModelConfig& model, const EngineConfig& config);

    const CacheLayout layout;

    // First row of K (0) or V (1) of a head, and its parameters.
    uint8_t* rows(int block, int layer, int value, int head) const;
    uint16_t* params(int block, int layer, int value, int head) const;
    // Stores x [D] as row `place` of a block.
    void write(const Kernels& k, int block, int layer, int value, int head, int place, const float* x) const;
    // Gives the pages back; they come again, zeroed, when they are written.
    void drop() const;
    // Whole blocks, one after the other.
    void copy(const std::vector<BlockCopy>& copies) const;

  private:
    struct Unmap {
        size_t bytes;
        void operator()(uint8_t* data) const;
    };
    std::unique_ptr<uint8_t, Unmap> data_;
};

}  // namespace turbomill::cpu
