// Chooses the decode kernel for a cache's format.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

using AttentionDecode = void(DType type, const DecodeArgs& args, const AttentionParts& parts,
                             const CacheView& cache, int layer, cudaStream_t stream);
AttentionDecode attention_decode_16, attention_decode_8, attention_decode_4;

// Whether a block may have the shared memory that heads of 256 need: 128 KB of rings, and what is static.
static bool large_rings_fit() {
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
    return most >= 140 * 1024;
}

bool attention_decode_fits(DType type, const CacheView& cache) {
    const int p = cache.block_len;
    return type != DType::F32 && (cache.bits < 16 || cache.dtype == type) &&
           (cache.head_dim == 64 || cache.head_dim == 128 || (cache.head_dim == 256 && large_rings_fit())) &&
           p >= 32 && (p & (p - 1)) == 0;
}

void attention_decode(DType type, const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache,
                      int layer, cudaStream_t stream) {
    if (args.count == 0) return;
    AttentionDecode* run = cache.bits == 8   ? attention_decode_8
                           : cache.bits == 4 ? attention_decode_4
                                             : attention_decode_16;
    run(type, args, parts, cache, layer, stream);
}

}  // namespace turbomill::cuda
