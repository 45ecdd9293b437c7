// Causal attention over the paged cache for every activation type, head size and cache format. Sixteen query
// rows and one KV head to a block; keys and values pass through shared memory as fp32, 32 tokens at a time,
// with an online softmax. The kernel that others are checked against, and the one for fp32.
#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 4, kKeys = 32, kRowsPerWarp = kQueryRows / kWarps;

size_t shared_bytes(int d) {
    return sizeof(float) * (size_t(kQueryRows) * d + size_t(kKeys) * (d + 1) + size_t(kKeys) * d);
}

// Columns: output columns of a lane, ceil(D / 32).
template <class T, int Columns>
__global__ void attention_kernel(AttentionArgs a, CacheView c) {
    extern __shared__ float shared[];
    const int d = c.head_dim, group = a.num_heads / c.heads, head = blockIdx.y;
    float* query = shared;                   // [16, D], scaled
    float* keys = query + kQueryRows * d;    // [32, D + 1]: a lane reads its own row
    float* values = keys + kKeys * (d + 1);  // [32, D]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const QueryTile tile = a.tiles[blockIdx.x];
    const SliceInfo slice = a.slices[tile.slice];
    const int rows = min(kQueryRows, slice.length * group - tile.first);
    const int64_t qkv_dim = int64_t(a.num_heads + 2 * c.heads) * d;
    for (int i = threadIdx.x; i < rows * d; i += kWarps * 32) {
        const int row = tile.first + i / d;
        const int64_t token = slice.first_row + row / group;
        const T* q = static_cast<const T*>(a.qkv) + token * qkv_dim + (head * group + row % group) * d;
        query[i] = to_float(q[i % d]) * a.scores.scale;
    }
    float acc[kRowsPerWarp][Columns], top[kRowsPerWarp], sum[kRowsPerWarp];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
        top[r] = -INFINITY;
        sum[r] = 0.f;
#pragma unroll
        for (int i = 0; i < Columns; ++i) acc[r][i] = 0.f;
    }
    const int end = slice.context + (tile.first + rows - 1) / group + 1;  // keys that the last row sees
    const int start = max(0, slice.context + tile.first / group + 1 - a.scores.window);  // and the first
    const float cap = a.scores.softcap;
    for (int begin = start / kKeys * kKeys; begin < end; begin += kKeys) {
        __syncthreads();
        const int chunks = d / 8;
        for (int i = threadIdx.x; i < 2 * kKeys * chunks; i += kWarps * 32) {
            const int value = i / (kKeys * chunks), key = i / chunks % kKeys, chunk = i % chunks;
            const int token = begin + key;
            float out[8] = {};
            if (token < end) {
                const int block = a.blocks[slice.block_offset + token / c.block_len];
                const int place = token % c.block_len;
                load_chunk(c, value, cache_row(c, block, value, head, place),
                           cache_params(c, block, value, head, place), chunk, out);
            }
            float* target = (value ? values + key * d : keys + key * (d + 1)) + 8 * chunk;
            for (int j = 0; j < 8; ++j) target[j] = out[j];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; ++r) {
            const int row = warp * kRowsPerWarp + r;
            const int seen = slice.context + (tile.first + row) / group + 1 - begin;
            const int unseen = seen - a.scores.window;  // keys before the row's window
            if (row >= rows || seen <= 0 || unseen >= kKeys) continue;
            float score = -INFINITY;
            if (lane < seen && lane >= unseen) {
                score = 0.f;
                for (int i = 0; i < d; ++i) score += query[row * d + i] * keys[lane * (d + 1) + i];
                if (cap > 0.f) score = cap * tanhf(score / cap);
            }
            const float new_top = fmaxf(top[r], warp_max(score));
            const float shrink = expf(top[r] - new_top), p = expf(score - new_top);
            sum[r] = sum[r] * shrink + warp_sum(p);
            top[r] = new_top;
#pragma unroll
            for (int i = 0; i < Columns; ++i) acc[r][i] *= shrink;
            for (int key = 0; key < min(seen, kKeys); ++key) {
                const float weight = __shfl_sync(kFullWarp, p, key);
#pragma unroll
                for (int i = 0; i < Columns; ++i)
                    if (lane + 32 * i < d) acc[r][i] += weight * values[key * d + lane + 32 * i];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
        const int row = warp * kRowsPerWarp + r, at = tile.first + row;
        if (row >= rows) continue;
        const int64_t token = slice.first_row + at / group;
        T* out = static_cast<T*>(a.out) + (token * a.num_heads + head * group + at % group) * d;
#pragma unroll
        for (int i = 0; i < Columns; ++i)
            if (lane + 32 * i < d) out[lane + 32 * i] = from_float<T>(acc[r][i] / sum[r]);
    }
}

template <class T, int Columns>
void launch(const AttentionArgs& args, const CacheView& cache, cudaStream_t stream) {
    const size_t bytes = shared_bytes(cache.head_dim);
    if (bytes > 48 * 1024)
        check(cudaFuncSetAttribute(attention_kernel<T, Columns>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   int(bytes)),
              "attention_any's shared memory");
    attention_kernel<T, Columns>
        <<<dim3(args.tile_count, cache.heads), kWarps * 32, bytes, stream>>>(args, cache);
}

}  // namespace

void attention_any(DType type, const AttentionArgs& args, const CacheView& cache, cudaStream_t stream) {
    if (args.tile_count == 0) return;
    with_type(type, [&]<class T>() {
        const int columns = blocks_for(cache.head_dim, 32);
        if (columns <= 2) return launch<T, 2>(args, cache, stream);
        if (columns <= 4) return launch<T, 4>(args, cache, stream);
        if (columns <= 8) return launch<T, 8>(args, cache, stream);
        throw std::invalid_argument("head_dim is larger than 256");
    });
    check_launch("attention_any");
}

}  // namespace turbomill::cuda
