// Chooses the tensor-core attention kernel for a cache's format.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

using AttentionTensor = void(DType type, const AttentionArgs& args, const AttentionParts& parts,
                             int tile_rows, const CacheView& cache, int layer, cudaStream_t stream);
AttentionTensor attention_tensor_16, attention_tensor_8, attention_tensor_4;

bool attention_tensor_fits(DType type, const CacheView& cache) {
    const int d = cache.head_dim;
    return type != DType::F32 && (cache.bits < 16 || cache.dtype == type) &&
           (d == 64 || d == 80 || d == 96 || d == 128);
}

void attention_tensor(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                      const CacheView& cache, int layer, cudaStream_t stream) {
    if (args.tile_count == 0) return;
    AttentionTensor* run = cache.bits == 8   ? attention_tensor_8
                           : cache.bits == 4 ? attention_tensor_4
                                             : attention_tensor_16;
    run(type, args, parts, tile_rows, cache, layer, stream);
    check_launch("attention_tensor");
}

}  // namespace turbomill::cuda
