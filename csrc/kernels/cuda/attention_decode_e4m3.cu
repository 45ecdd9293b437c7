// attention_decode for a cache of fp8 codes, e4m3.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_e4m3(DType type, const DecodeArgs& args, const AttentionParts& parts,
                           const CacheView& cache, cudaStream_t stream) {
    attention_decode_for<16, 32, 2>(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
