// attention_tensor for a cache of plain 16-bit values.
#include "kernels/cuda/attention_tensor.cuh"

namespace turbomill::cuda {

void attention_tensor_plain(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                            const CacheView& cache, cudaStream_t stream) {
    attention_tensor_for<0>(type, args, parts, tile_rows, cache, stream);
}

}  // namespace turbomill::cuda
