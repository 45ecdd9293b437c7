// Causal attention over the paged cache on the tensor cores, for 16-bit activations: FlashAttention's online
// softmax over tiles of 64 keys, which are dequantized on their way into shared memory.
//
// A block of four warps owns 16 * RowWarps query rows of one slice and KV head. With RowWarps 4 (prompts) the
// warps own different rows and share the keys; with 1 (decodes, where a KV head's query heads fill the rows)
// they take a quarter of each tile's keys and merge at the end. A tile may cover a part of the keys only: the
// last block of its parts to arrive merges their results, in order.
#include <type_traits>

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 4, kKeys = 64;

template <int D>
constexpr int kStride = D + 8;  // of a key in shared memory: rows of ldmatrix fall into different banks

template <int D>
constexpr size_t kShared = 2 * size_t(kKeys) * kStride<D> * 2;

__device__ inline void load_matrices(unsigned (&r)[4], const void* shared) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void load_transposed(unsigned (&r)[4], const void* shared) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Keys and values of tokens [begin, begin + 64) to shared memory in T; tokens from `end` on as zeros.
template <class T, int D>
__device__ void load_tile(const AttentionArgs& a, const CacheView& c, int layer, int head, const int* blocks,
                          int begin, int end, T* keys, T* values) {
    constexpr int kChunks = D / 8;
    const bool same_type = c.bits == 16 && c.dtype == (std::is_same_v<T, __half> ? DType::F16 : DType::BF16);
    for (int i = threadIdx.x; i < 2 * kKeys * kChunks; i += kWarps * 32) {
        const int value = i / (kKeys * kChunks), key = i / kChunks % kKeys, chunk = i % kChunks;
        const int token = begin + key;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (token < end) {
            const int block = blocks[token / c.block_len], place = token % c.block_len;
            const uint8_t* row = cache_row(c, layer, block, value, head, place);
            if (same_type) {
                packed = reinterpret_cast<const uint4*>(row)[chunk];
            } else {
                float v[8];
                load_chunk(c, row, cache_params(c, layer, block, value, head, place), chunk, v);
                packed = make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                                    pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7]));
            }
        }
        *reinterpret_cast<uint4*>((value ? values : keys) + key * kStride<D> + 8 * chunk) = packed;
    }
}

// The running softmax of a warp's rows g (0) and g + 8 (1): sums are of this thread's columns only.
template <int D>
struct Softmax {
    float out[D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
};

// One tile's keys [first_key, first_key + 8 Tiles), which start at token `token` and end before limit[row].
template <class T, int D, int Tiles>
__device__ void attend(const unsigned (&query)[D / 16][4], const T* keys, const T* values, int token,
                       const int (&limit)[2], float scale, Softmax<D>& s) {
    const int lane = threadIdx.x % 32, t = lane % 4, matrix = lane / 8, row = lane % 8;
    float score[Tiles][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int j = 0; j < Tiles; j += 2) {
            unsigned b[4];
            load_matrices(b, keys + (8 * j + matrix / 2 * 8 + row) * kStride<D> + 16 * i + matrix % 2 * 8);
            mma<T>(score[j], query[i], b[0], b[1]);
            mma<T>(score[j + 1], query[i], b[2], b[3]);
        }
    }
    float top[2] = {s.top[0], s.top[1]};
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool seen = token + 8 * j + 2 * t + i % 2 < limit[i / 2];
            score[j][i] = seen ? score[j][i] * scale : -INFINITY;
            top[i / 2] = fmaxf(top[i / 2], score[j][i]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(kFullWarp, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(kFullWarp, top[r], 2));
        const float base = top[r] == -INFINITY ? 0.f : top[r];  // no key seen yet: all weights are 0
        const float shrink = exp2f(s.top[r] - base);
        s.top[r] = top[r];
        top[r] = base;
        s.sum[r] *= shrink;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) s.out[i][2 * r] *= shrink, s.out[i][2 * r + 1] *= shrink;
    }
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[j][i] = exp2f(score[j][i] - top[i / 2]);
            s.sum[i / 2] += score[j][i];
        }
    }
#pragma unroll
    for (int c = 0; c < Tiles / 2; ++c) {
        const unsigned p[4] = {pack_pair<T>(score[2 * c][0], score[2 * c][1]),
                               pack_pair<T>(score[2 * c][2], score[2 * c][3]),
                               pack_pair<T>(score[2 * c + 1][0], score[2 * c + 1][1]),
                               pack_pair<T>(score[2 * c + 1][2], score[2 * c + 1][3])};
#pragma unroll
        for (int j = 0; j < D / 8; j += 2) {
            unsigned b[4];
            load_transposed(b,
                            values + (16 * c + matrix % 2 * 8 + row) * kStride<D> + 8 * j + matrix / 2 * 8);
            mma<T>(s.out[j], p, b[0], b[1]);
            mma<T>(s.out[j + 1], p, b[2], b[3]);
        }
    }
}

template <class T, int D, int RowWarps>
__global__ void __launch_bounds__(kWarps * 32)
    attention_kernel(AttentionArgs a, AttentionParts parts, CacheView c, int layer) {
    constexpr int kKeyWarps = kWarps / RowWarps, kRows = 16 * RowWarps, kWarpKeys = kKeys / kKeyWarps;
    constexpr int kOut = D + 4;  // stride of an output row while warps merge
    extern __shared__ uint4 shared[];
    T* keys = reinterpret_cast<T*>(shared);  // [64, D + 8]
    T* values = keys + kKeys * kStride<D>;   // [64, D + 8]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp / kKeyWarps, key_warp = warp % kKeyWarps;
    const QueryTile tile = a.tiles[blockIdx.x];
    const SliceInfo slice = a.slices[tile.slice];
    const int head = blockIdx.y, group = a.num_heads / c.heads, all_rows = slice.length * group;
    const float scale = 1.4426950408889634f / sqrtf(float(D));  // scores in powers of two

    // The query's fragments, and how many keys its rows see.
    unsigned query[D / 16][4];
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = tile.first + 16 * row_warp + g + 8 * r;
        const bool inside = row < all_rows;
        limit[r] = slice.context + min(row, all_rows - 1) / group + 1;
        const T* q = static_cast<const T*>(a.qkv) +
                     int64_t(slice.first_row + row / group) * (a.num_heads + 2 * c.heads) * D +
                     (head * group + row % group) * D + 2 * t;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            query[i][r] = inside ? *reinterpret_cast<const unsigned*>(q + 16 * i) : 0u;
            query[i][r + 2] = inside ? *reinterpret_cast<const unsigned*>(q + 16 * i + 8) : 0u;
        }
    }
    Softmax<D> s;
    const int last_row = min(tile.first + kRows, all_rows) - 1;
    const int end = min(tile.end, slice.context + last_row / group + 1);
    for (int begin = tile.begin; begin < end; begin += kKeys) {
        __syncthreads();
        load_tile<T, D>(a, c, layer, head, a.blocks + slice.block_offset, begin, end, keys, values);
        __syncthreads();
        const int first = key_warp * kWarpKeys;
        attend<T, D, kWarpKeys / 8>(query, keys + first * kStride<D>, values + first * kStride<D>,
                                    begin + first, limit, scale, s);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        s.sum[r] += __shfl_xor_sync(kFullWarp, s.sum[r], 1);
        s.sum[r] += __shfl_xor_sync(kFullWarp, s.sum[r], 2);
    }
    const auto write = [&](int row, int column, float value) {
        const int at = tile.first + row;
        if (at >= all_rows) return;
        const int64_t token = slice.first_row + at / group;
        static_cast<T*>(a.out)[(token * a.num_heads + head * group + at % group) * D + column] =
            from_float<T>(value);
    };
    if constexpr (kKeyWarps == 1) {
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                write(16 * row_warp + g + i / 2 * 8, 8 * j + 2 * t + i % 2, s.out[j][i] / s.sum[i / 2]);
    } else {
        __shared__ float tops[kWarps][16], sums[kWarps][16];
        __shared__ bool last;
        float* merged = reinterpret_cast<float*>(shared);  // [4, 16, D + 4], over keys and values
        if (t == 0)
            for (int r = 0; r < 2; ++r) {
                tops[warp][g + 8 * r] = s.top[r];
                sums[warp][g + 8 * r] = s.sum[r];
            }
        __syncthreads();
        float factor[2];
        for (int r = 0; r < 2; ++r) {
            float top = -INFINITY;
            for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w][g + 8 * r]);
            factor[r] = top == -INFINITY ? 0.f : exp2f(s.top[r] - top);
        }
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                merged[(warp * 16 + g + i / 2 * 8) * kOut + 8 * j + 2 * t + i % 2] =
                    s.out[j][i] * factor[i / 2];
        __syncthreads();
        // A partial result: 16 rows of D outputs, not yet divided, then 16 tops and 16 sums.
        constexpr int kPart = 16 * D + 32;
        const int64_t first_part = int64_t(tile.first_slot) * c.heads + head;
        float* part = parts.data + (first_part + int64_t(tile.part) * c.heads) * kPart;
        for (int i = threadIdx.x; i < 16 * D; i += kWarps * 32) {
            const int row = i / D, column = i % D;
            float top = -INFINITY, sum = 0.f, out = 0.f;
            for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w][row]);
            for (int w = 0; w < kWarps; ++w) {
                if (sums[w][row] > 0.f) sum += sums[w][row] * exp2f(tops[w][row] - top);
                out += merged[(w * 16 + row) * kOut + column];
            }
            if (tile.parts == 1) {
                write(row, column, out / sum);
                continue;
            }
            part[i] = out;
            if (column == 0) part[16 * D + row] = top, part[16 * D + 16 + row] = sum;
        }
        if (tile.parts == 1) return;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(parts.counters + first_part, 1u) == unsigned(tile.parts - 1);
        __syncthreads();
        if (!last) return;
        __threadfence();
        const float* all = parts.data + first_part * kPart;
        const int64_t step = int64_t(c.heads) * kPart;
        for (int i = threadIdx.x; i < 16 * D; i += kWarps * 32) {
            const int row = i / D;
            float top = -INFINITY, sum = 0.f, out = 0.f;
            for (int p = 0; p < tile.parts; ++p) top = fmaxf(top, __ldcg(all + p * step + 16 * D + row));
            for (int p = 0; p < tile.parts; ++p) {
                const float weight = exp2f(__ldcg(all + p * step + 16 * D + row) - top);
                sum += __ldcg(all + p * step + 16 * D + 16 + row) * weight;
                out += __ldcg(all + p * step + i) * weight;
            }
            write(row, i % D, out / sum);
        }
        if (threadIdx.x == 0) parts.counters[first_part] = 0;
    }
}

template <class T, int D, int RowWarps>
void launch(const AttentionArgs& args, const AttentionParts& parts, const CacheView& cache, int layer,
            cudaStream_t stream) {
    constexpr auto kernel = attention_kernel<T, D, RowWarps>;
    if constexpr (kShared<D> > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared<D>)),
              "attention's shared memory");
    kernel<<<dim3(args.tile_count, cache.heads), kWarps * 32, kShared<D>, stream>>>(args, parts, cache,
                                                                                    layer);
}

template <class T, int RowWarps>
void launch_for_dim(const AttentionArgs& args, const AttentionParts& parts, const CacheView& cache, int layer,
                    cudaStream_t stream) {
    switch (cache.head_dim) {
        case 64:
            return launch<T, 64, RowWarps>(args, parts, cache, layer, stream);
        case 80:
            return launch<T, 80, RowWarps>(args, parts, cache, layer, stream);
        case 96:
            return launch<T, 96, RowWarps>(args, parts, cache, layer, stream);
        case 128:
            return launch<T, 128, RowWarps>(args, parts, cache, layer, stream);
    }
    throw std::invalid_argument("attention_tensor: no kernel for this head_dim");
}

}  // namespace

bool attention_tensor_fits(DType type, int head_dim) {
    return type != DType::F32 && (head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128);
}

void attention_tensor(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                      const CacheView& cache, int layer, cudaStream_t stream) {
    if (args.tile_count == 0) return;
    with_half_type(type, [&]<class T>() {
        if (tile_rows == kQueryRows) {
            launch_for_dim<T, 1>(args, parts, cache, layer, stream);
        } else {
            launch_for_dim<T, 4>(args, parts, cache, layer, stream);
        }
    });
    check_launch("attention_tensor");
}

}  // namespace turbomill::cuda
