// Causal attention over the paged cache on the tensor cores, for 16-bit activations: FlashAttention's online
// softmax over tiles of 64 keys, which are dequantized on their way into shared memory.
//
// A block of four warps owns 16 * RowWarps query rows of one slice and KV head. With RowWarps 4 (prompts) the
// warps own different rows and share the keys; with 1 (decodes, where a KV head's query heads fill the rows)
// they take a quarter of each tile's keys and merge at the end. A tile may cover a part of the keys only: the
// last block of its parts to arrive merges their results, in order.
#pragma once

#include <type_traits>

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/kv_codes.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/scores.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 4, kKeys = 64;

template <int D>
constexpr int kStride = D + 8;  // of a key in shared memory: rows of ldmatrix fall into different banks

template <int D>
constexpr int kStage = 2 * kKeys * kStride<D>;  // elements of a tile's keys and values
template <int D>
constexpr size_t kShared = 2 * size_t(kStage<D>) * 2;  // two tiles

// Brings tiles of 64 keys and values to shared memory in T, in two steps so that a tile's memory accesses run
// while the tile before it is computed: plain values by asynchronous copies, codes through registers. Tokens
// from `end` on become zeros. Policy: of the cache, 0 for one in T.
template <class T, int D, int Policy>
class TileLoader {
  public:
    __device__ TileLoader(const CacheView& cache, int head, const int* blocks, int end)
        : c_(cache), head_(head), blocks_(blocks), end_(end), one_block_(cache.block_len % kKeys == 0) {}

    // Asks for tokens [begin, begin + 64); a stage is keys [64, D + 8], then values.
    __device__ void request(int begin, T* stage) {
        const int tile_block = one_block_ ? blocks_[begin / c_.block_len] : 0;
        const int tile_place = one_block_ ? begin % c_.block_len : 0;
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = threadIdx.x + n * kWarps * 32, key = i / kChunks, chunk = i % kChunks;
            const int token = begin + key;
            const bool inside = token < end_;
            int block = tile_block, place = tile_place + key;
            if (!one_block_) {
                block = inside ? blocks_[token / c_.block_len] : 0;
                place = token % c_.block_len;
            }
#pragma unroll
            for (int value = 0; value < 2; ++value) {
                const uint8_t* row = cache_row(c_, block, value, head_, place);
                if constexpr (Policy == 0) {
                    const T* target = stage + (value * kKeys + key) * kStride<D> + 8 * chunk;
                    copy_async(target, inside ? row + 16 * chunk : c_.data, inside ? 16 : 0);
                } else {
                    if (value)
                        value_codes_[n] = inside ? reinterpret_cast<const Values*>(row)[chunk] : Values{};
                    else
                        key_codes_[n] = inside ? reinterpret_cast<const Keys*>(row)[chunk] : Keys{};
                    params_[value][n] = inside ? *cache_params(c_, block, value, head_, place) : __half2();
                }
            }
        }
    }

    // Completes this thread's share of what was requested last; a barrier must follow.
    __device__ void complete(T* stage) {
        if constexpr (Policy == 0) {
            commit_copies();
            wait_copies<0>();
        } else {
#pragma unroll
            for (int n = 0; n < kEach; ++n) {
                const int i = threadIdx.x + n * kWarps * 32, key = i / kChunks, chunk = i % kChunks;
                T* place = stage + key * kStride<D> + 8 * chunk;
                *reinterpret_cast<uint4*>(place) =
                    dequantize<T, kKeyFormat<Policy>>(key_codes_[n], params_[0][n]);
                *reinterpret_cast<uint4*>(place + kKeys * kStride<D>) =
                    dequantize<T, kValueFormat<Policy>>(value_codes_[n], params_[1][n]);
            }
        }
    }

  private:
    static constexpr int kChunks = D / 8, kEach = kKeys * kChunks / (kWarps * 32);
    using Keys = EightCodes<kKeyFormat<Policy>>;
    using Values = EightCodes<kValueFormat<Policy>>;

    const CacheView& c_;
    const int head_;
    const int* blocks_;
    const int end_;
    const bool one_block_;  // a tile lies in one cache block
    Keys key_codes_[Policy == 0 ? 1 : kEach];
    Values value_codes_[Policy == 0 ? 1 : kEach];
    __half2 params_[2][Policy == 0 ? 1 : kEach];
};

// The running softmax of a warp's rows g (0) and g + 8 (1): sums are of this thread's columns only.
template <int D>
struct Softmax {
    float out[D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
};

// One tile's keys [first_key, first_key + 8 Tiles), which start at token `token`; row r sees those of the
// window that ends before limit[r].
template <class T, int D, int Tiles>
__device__ void attend(const unsigned (&query)[D / 16][4], const T* keys, const T* values, int token,
                       const int (&limit)[2], const Scores& scores, Softmax<D>& s) {
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
    const float scale = kLog2E * scores.scale;  // scores in powers of two
    if (scores.softcap > 0.f) {
        const SoftCap cap(scores.scale, scores.softcap);
#pragma unroll
        for (int j = 0; j < Tiles; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[j][i] = cap(score[j][i]);
    }
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = token + 8 * j + 2 * t + i % 2;
            const bool seen = at < limit[i / 2] && at >= limit[i / 2] - scores.window;
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

template <class T, int D, int RowWarps, int Policy>
__global__ void __launch_bounds__(kWarps * 32, RowWarps == 1 ? 3 : 2)
    attention_kernel(AttentionArgs a, AttentionParts parts, CacheView c) {
    constexpr int kKeyWarps = kWarps / RowWarps, kRows = 16 * RowWarps, kWarpKeys = kKeys / kKeyWarps;
    constexpr int kOut = D + 4;  // stride of an output row while warps merge
    extern __shared__ uint4 shared[];
    T* stages = reinterpret_cast<T*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp / kKeyWarps, key_warp = warp % kKeyWarps;
    const QueryTile tile = a.tiles[blockIdx.x];
    const SliceInfo slice = a.slices[tile.slice];
    const int head = blockIdx.y, group = a.num_heads / c.heads, all_rows = slice.length * group;

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
    TileLoader<T, D, Policy> loader(c, head, a.blocks + slice.block_offset, end);
    T *current = stages, *next = stages + kStage<D>;
    // Keys before `start` no row sees.
    const int unseen = slice.context + tile.first / group + 1 - a.scores.window;
    const int start = max(tile.begin, unseen / kKeys * kKeys);
    if (start < end) {
        loader.request(start, current);
        loader.complete(current);
    }
    __syncthreads();
    for (int begin = start; begin < end; begin += kKeys) {
        const bool more = begin + kKeys < end;
        if (more) loader.request(begin + kKeys, next);
        const T* keys = current + key_warp * kWarpKeys * kStride<D>;
        attend<T, D, kWarpKeys / 8>(query, keys, keys + kKeys * kStride<D>, begin + key_warp * kWarpKeys,
                                    limit, a.scores, s);
        if (more) loader.complete(next);
        __syncthreads();
        T* done = current;
        current = next;
        next = done;
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
        float* merged = reinterpret_cast<float*>(shared);  // [4, 16, D + 4], over the tiles
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

template <class T, int D, int RowWarps, int Policy>
void launch(const AttentionArgs& args, const AttentionParts& parts, const CacheView& cache,
            cudaStream_t stream) {
    constexpr auto kernel = attention_kernel<T, D, RowWarps, Policy>;
    if constexpr (kShared<D> > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared<D>)),
              "attention's shared memory");
    kernel<<<dim3(args.tile_count, cache.heads), kWarps * 32, kShared<D>, stream>>>(args, parts, cache);
}

template <class T, int RowWarps, int Policy>
void launch_for_dim(const AttentionArgs& args, const AttentionParts& parts, const CacheView& cache,
                    cudaStream_t stream) {
    switch (cache.head_dim) {
        case 64:
            return launch<T, 64, RowWarps, Policy>(args, parts, cache, stream);
        case 80:
            return launch<T, 80, RowWarps, Policy>(args, parts, cache, stream);
        case 96:
            return launch<T, 96, RowWarps, Policy>(args, parts, cache, stream);
        case 128:
            return launch<T, 128, RowWarps, Policy>(args, parts, cache, stream);
    }
    throw std::invalid_argument("attention_tensor: no kernel for this head_dim");
}

}  // namespace

// Once in each file that includes this, for the cache format of that file.
template <int Policy>
void attention_tensor_for(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                          const CacheView& cache, cudaStream_t stream) {
    with_half_type(type, [&]<class T>() {
        if (tile_rows == kQueryRows) {
            launch_for_dim<T, 1, Policy>(args, parts, cache, stream);
        } else {
            launch_for_dim<T, 4, Policy>(args, parts, cache, stream);
        }
    });
}

}  // namespace turbomill::cuda
