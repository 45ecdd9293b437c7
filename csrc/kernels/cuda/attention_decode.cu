// Chooses the decode kernel for a cache's format.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

using AttentionDecode = void(DType type, const DecodeArgs& args, const AttentionParts& parts,
                             const CacheView& cache, cudaStream_t stream);
AttentionDecode attention_decode_plain, attention_decode_8, attention_decode_4, attention_decode_k8v4,
    attention_decode_e4m3, attention_decode_e5m2;

// Whether a block may have the shared memory that heads of 256 need: 128 KB of rings, and what is static.
static bool large_rings_fit() {
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
    return most >= 140 * 1024;
}

bool attention_decode_fits(DType type, const CacheView& cache) {
    const int p = cache.block_len;
    return type != DType::F32 && (cache.quantized() || cache.dtype == type) &&
           (cache.head_dim == 64 || cache.head_dim == 128 || (cache.head_dim == 256 && large_rings_fit())) &&
           p >= 32 && (p & (p - 1)) == 0;
}

bool attention_decode_rotates(const CacheView& cache) {
    return cache.policy == 4 && cache.head_dim <= 128;  // kRotatesInside
}

void attention_decode(DType type, const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache,
                      cudaStream_t stream) {
    if (args.count == 0) return;
    AttentionDecode* run = cache.policy == 0    ? attention_decode_plain
                           : cache.policy == 8  ? attention_decode_8
                           : cache.policy == 4  ? attention_decode_4
                           : cache.policy == 84 ? attention_decode_k8v4
                           : cache.policy == 16 ? attention_decode_e4m3
                                                : attention_decode_e5m2;
    run(type, args, parts, cache, stream);
}

}  // namespace turbomill::cuda
