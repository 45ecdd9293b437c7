// attention_decode for a cache of plain 16-bit values.
#include "kernels/cuda/attention_decode.cuh"

namespace turbomill::cuda {

void attention_decode_plain(DType type, const DecodeArgs& args, const AttentionParts& parts,
                            const CacheView& cache, cudaStream_t stream) {
    attention_decode_for<0, 16, 2>(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
