// attention_decode for a cache of fp8 codes, e5m2.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_e5m2(DType type, const DecodeArgs& args, const AttentionParts& parts,
                           const CacheView& cache, cudaStream_t stream) {
    attention_decode_for<17, 32, 2>(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
