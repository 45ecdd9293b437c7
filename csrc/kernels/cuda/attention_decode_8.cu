// attention_decode for a cache of int8 codes.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_8(DType type, const DecodeArgs& args, const AttentionParts& parts,
                        const CacheView& cache, cudaStream_t stream) {
    attention_decode_for<8, 32, 2>(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
