// attention_decode for a cache of plain 16-bit values.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_16(DType type, const DecodeArgs& args, const AttentionParts& parts,
                         const CacheView& cache, int layer, cudaStream_t stream) {
    attention_decode_for<16, 16, 2>(type, args, parts, cache, layer, stream);
}

}  // namespace turbomill::cuda
