// attention_tensor for a cache of int8 keys and int4 values.
#include "kernels/cuda/attention_tensor.cuh"

namespace turbomill::cuda {

void attention_tensor_k8v4(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                           const CacheView& cache, cudaStream_t stream) {
    attention_tensor_for<84>(type, args, parts, tile_rows, cache, stream);
}

}  // namespace turbomill::cuda
