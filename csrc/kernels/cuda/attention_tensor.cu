// Chooses the tensor-core attention kernel for a cache's format.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

using AttentionTensor = void(DType type, const AttentionArgs& args, const AttentionParts& parts,
                             int tile_rows, const CacheView& cache, cudaStream_t stream);
AttentionTensor attention_tensor_plain, attention_tensor_8, attention_tensor_4, attention_tensor_k8v4,
    attention_tensor_e4m3, attention_tensor_e5m2;

bool attention_tensor_fits(DType type, const CacheView& cache) {
    const int d = cache.head_dim;
    return type != DType::F32 && (cache.quantized() || cache.dtype == type) &&
           (d == 64 || d == 80 || d == 96 || d == 128);
}

void attention_tensor(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                      const CacheView& cache, cudaStream_t stream) {
    if (args.tile_count == 0) return;
    AttentionTensor* run = cache.policy == 0    ? attention_tensor_plain
                           : cache.policy == 8  ? attention_tensor_8
                           : cache.policy == 4  ? attention_tensor_4
                           : cache.policy == 84 ? attention_tensor_k8v4
                           : cache.policy == 16 ? attention_tensor_e4m3
                                                : attention_tensor_e5m2;
    run(type, args, parts, tile_rows, cache, stream);
    check_launch("attention_tensor");
}

}  // namespace turbomill::cuda
