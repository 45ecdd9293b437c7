// attention_tensor for a cache of fp8 codes, e4m3.
#include "kernels/cuda/attention_tensor.cuh"

namespace turbomill::cuda {

void attention_tensor_e4m3(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                           const CacheView& cache, cudaStream_t stream) {
    attention_tensor_for<16>(type, args, parts, tile_rows, cache, stream);
}

}  // namespace turbomill::cuda
