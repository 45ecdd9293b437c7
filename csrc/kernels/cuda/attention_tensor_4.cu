// attention_tensor for a cache of int4 codes.
#include "kernels/cuda/attention_tensor.cuh"

namespace turbomill::cuda {

void attention_tensor_4(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                        const CacheView& cache, cudaStream_t stream) {
    attention_tensor_for<4>(type, args, parts, tile_rows, cache, stream);
}

}  // namespace turbomill::cuda
