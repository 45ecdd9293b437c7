// Causal attention over the paged cache, block by block with an online softmax (FlashAttention's recurrence).
#pragma once

#include <vector>

#include "core/thread_pool.h"
#include "engine/batch.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_cache.h"

namespace turbomill::cpu {

class Attention {
  public:
    // `deterministic`: a query's result does not depend on what is computed beside it.
    Attention(const ModelConfig& model, const Kernels& kernels, const KvCache& cache, ThreadPool& pool,
              bool deterministic);

    // qkv [T, (Nq + 2 Nkv) D] with rotated queries; out [T, Nq D]. Slice i's tokens start at row first[i].
    void operator()(int layer, const BatchData& batch, const std::vector<int>& first, const float* qkv,
                    float* out);

  private:
    struct Scratch {
        std::vector<float> query, keys, values, scores, acc, max, sum;
    };
    // Some consecutive query tokens of one slice.
    struct Tile {
        int slice, begin, count;
    };

    void tile(int layer, const Slice& slice, const Tile& tile, int head, const float* qkv, float* out,
              Scratch& s);
    // Tokens [0, count) of a block as fp32 [count, D]: a copy in `scratch`, or the cache itself when it is
    // fp32.
    const float* load(int layer, int block, int value, int head, int count,
                      std::vector<float>& scratch) const;

    const ModelConfig& model_;
    const Kernels& k_;
    const KvCache& cache_;
    ThreadPool& pool_;
    const bool deterministic_;
    std::vector<Scratch> scratch_;  // per worker
    std::vector<Tile> tiles_;
};

}  // namespace turbomill::cpu
