// attention_decode for a cache of int4 codes.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_4(DType type, const DecodeArgs& args, const AttentionParts& parts,
                        const CacheView& cache, cudaStream_t stream) {
    attention_decode_for<4, 32, 2>(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
