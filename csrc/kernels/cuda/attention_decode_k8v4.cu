// attention_decode for a cache of int8 keys and int4 values.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_k8v4(DType type, const DecodeArgs& args, const AttentionParts& parts,
                           const CacheView& cache, cudaStream_t stream) {
    attention_decode_for<84, 32, 2>(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
