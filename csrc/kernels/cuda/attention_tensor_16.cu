// attention_tensor for a cache of plain 16-bit values.
#include "kernels/cuda/attention_tensor.cuh"

namespace turbomill::cuda {

void attention_tensor_16(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                         const CacheView& cache, int layer, cudaStream_t stream) {
    attention_tensor_for<16>(type, args, parts, tile_rows, cache, layer, stream);
}

}  // namespace turbomill::cuda
