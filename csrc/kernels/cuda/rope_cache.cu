// Norms of heads, rotary embedding and the cache write: a few threads for each token and head where a vector
// kernel fits, else one warp.
#include <type_traits>

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 256;
constexpr int kPerLane = kMaxDim / 32;

__device__ void write_quantized(const CacheView& c, const float* v, uint8_t* row, __half2* params,
                                uint8_t* codes, int lane) {
    const int d = c.head_dim;
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (lane + 32 * i < d) low = fminf(low, v[i]), high = fmaxf(high, v[i]);
    const Quantizer quantizer(warp_min(low), warp_max(high), (1 << c.bits) - 1);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (lane + 32 * i < d) codes[lane + 32 * i] = uint8_t(quantizer.code(v[i]));
    __syncwarp();
    if (c.bits == 8) {
        for (int i = lane; i < d; i += 32) row[i] = codes[i];
    } else {
        for (int i = lane; i < d / 2; i += 32) row[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    }
    if (lane == 0) *params = quantizer.params;
}

__device__ void write_plain(const CacheView& c, const float* v, uint8_t* row, int lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + 32 * i;
        if (at >= c.head_dim) break;
        if (c.dtype == DType::F32) {
            reinterpret_cast<float*>(row)[at] = v[i];
        } else if (c.dtype == DType::F16) {
            reinterpret_cast<__half*>(row)[at] = __float2half_rn(v[i]);
        } else {
            reinterpret_cast<__nv_bfloat16*>(row)[at] = __float2bfloat16_rn(v[i]);
        }
    }
}

// The weights of the norm of a head, or null.
__device__ inline const float* head_norm(const RopeArgs& a, const CacheView& c, int head) {
    return head < a.num_heads ? a.q_norm : head < a.num_heads + c.heads ? a.k_norm : nullptr;
}

template <class T>
__global__ void rope_cache_kernel(RopeArgs a, CacheView c, int layer) {
    __shared__ float staged[kWarps][kMaxDim];
    __shared__ uint8_t codes[kWarps][kMaxDim];
    allow_next();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token = blockIdx.x, head = blockIdx.y * kWarps + warp, d = c.head_dim;
    const int heads = a.num_heads + 2 * c.heads;
    if (head >= heads) {
        wait_for_previous();
        return;  // whole warps leave; the rest only synchronise within a warp
    }
    T* row = static_cast<T*>(a.qkv) + (int64_t(token) * heads + head) * d;
    const int position = a.positions[token], slice = a.row_slice[token];
    const float *cos = a.cos + int64_t(position) * a.half, *sin = a.sin + int64_t(position) * a.half;
    const bool rotates = head < a.num_heads + c.heads;
    float cosine[kPerLane], sine[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + 32 * i;
        const bool rotated = rotates && at < 2 * a.half;
        cosine[i] = rotated ? cos[at < a.half ? at : at - a.half] : 1.f;
        sine[i] = rotated ? sin[at < a.half ? at : at - a.half] : 0.f;
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (lane + 32 * i < d) staged[warp][lane + 32 * i] = to_float(row[lane + 32 * i]);
    if (const float* norm = head_norm(a, c, head)) {
        float squares = 0.f;
        for (int i = lane; i < d; i += 32) squares += staged[warp][i] * staged[warp][i];
        const float scale = 1.f / sqrtf(warp_sum(squares) / float(d) + a.norm_eps);
        for (int i = lane; i < d; i += 32) staged[warp][i] *= scale * norm[i];
    }
    __syncwarp();
    float v[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + 32 * i;
        if (at >= d) break;
        v[i] = staged[warp][at];
        if (!rotates || at >= 2 * a.half) continue;
        const int j = at < a.half ? at : at - a.half;
        const float x = staged[warp][j], y = staged[warp][j + a.half];
        v[i] = at < a.half ? x * cosine[i] - y * sine[i] : y * cosine[i] + x * sine[i];
    }
    if (head < a.num_heads) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (lane + 32 * i < d) row[lane + 32 * i] = from_float<T>(v[i]);
        return;
    }
    if (slice < 0) return;
    const int value = (head - a.num_heads) / c.heads, kv_head = (head - a.num_heads) % c.heads;
    const int block = a.blocks[a.slices[slice].block_offset + position / c.block_len];
    const int place = position % c.block_len;
    uint8_t* target = cache_row(c, layer, block, value, kv_head, place);
    if (c.bits < 16) {
        write_quantized(c, v, target, cache_params(c, layer, block, value, kv_head, place), codes[warp],
                        lane);
    } else {
        write_plain(c, v, target, lane);
    }
}

// Sixteen elements of a head to a thread: eight of its first half, and the eight that they rotate with. Bits:
// 16 for a cache in T, or of its codes. Norm: heads are normalised first.
template <class T, int D, int Bits, bool Norm>
__global__ void __launch_bounds__(kWarps * 32) rope_cache_16_kernel(RopeArgs a, CacheView c, int layer) {
    constexpr int kLanes = D / 16;  // of a head
    allow_next();
    const int heads = a.num_heads + 2 * c.heads, lane = threadIdx.x % kLanes;
    const int item = (int(blockIdx.x) * kWarps * 32 + int(threadIdx.x)) / kLanes;
    const bool inside = item < a.tokens * heads;
    const int token = inside ? item / heads : a.tokens - 1, head = inside ? item % heads : heads - 1;
    T* row = static_cast<T*>(a.qkv) + (int64_t(token) * heads + head) * D + 8 * lane;
    const int position = a.positions[token], slice = a.row_slice[token];
    const bool rotates = head < a.num_heads + c.heads;
    float cosine[8], sine[8], low[8], high[8];
    if (rotates) {
        load8(a.cos + int64_t(position) * (D / 2) + 8 * lane, cosine);
        load8(a.sin + int64_t(position) * (D / 2) + 8 * lane, sine);
    }
    wait_for_previous();
    load8(row, low);
    load8(row + D / 2, high);
    if constexpr (Norm) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += low[i] * low[i] + high[i] * high[i];
#pragma unroll
        for (int mask = kLanes / 2; mask; mask /= 2) squares += __shfl_xor_sync(kFullWarp, squares, mask);
        if (rotates) {
            const float* norm = head_norm(a, c, head) + 8 * lane;
            const float scale = 1.f / sqrtf(squares / float(D) + a.norm_eps);
            float weight[8];
            load8(norm, weight);
#pragma unroll
            for (int i = 0; i < 8; ++i) low[i] *= scale * weight[i];
            load8(norm + D / 2, weight);
#pragma unroll
            for (int i = 0; i < 8; ++i) high[i] *= scale * weight[i];
        }
    }
    if (rotates) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = low[i], y = high[i];
            low[i] = x * cosine[i] - y * sine[i];
            high[i] = y * cosine[i] + x * sine[i];
        }
    }
    if (inside && head < a.num_heads) {
        store8(row, low);
        store8(row + D / 2, high);
    }
    const bool cached = inside && head >= a.num_heads && slice >= 0;
    uint8_t* target = nullptr;
    __half2* params = nullptr;
    if (cached) {
        const int value = (head - a.num_heads) / c.heads, kv_head = (head - a.num_heads) % c.heads;
        const int block = a.blocks[a.slices[slice].block_offset + position / c.block_len];
        const int place = position % c.block_len;
        target = cache_row(c, layer, block, value, kv_head, place);
        params = cache_params(c, layer, block, value, kv_head, place);
    }
    if constexpr (Bits == 16) {
        if (!cached) return;
        store8(reinterpret_cast<T*>(target) + 8 * lane, low);
        store8(reinterpret_cast<T*>(target) + 8 * lane + D / 2, high);
    } else {
        float least = low[0], most = low[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            least = fminf(least, fminf(low[i], high[i]));
            most = fmaxf(most, fmaxf(low[i], high[i]));
        }
#pragma unroll
        for (int mask = kLanes / 2; mask; mask /= 2) {
            least = fminf(least, __shfl_xor_sync(kFullWarp, least, mask));
            most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, mask));
        }
        const Quantizer quantizer(least, most, (1 << Bits) - 1);
        if (!cached) return;
        using Codes = std::conditional_t<Bits == 8, uint64_t, uint32_t>;  // eight
        Codes codes[2] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[0] |= Codes(quantizer.code(low[i])) << (Bits * i);
            codes[1] |= Codes(quantizer.code(high[i])) << (Bits * i);
        }
        reinterpret_cast<Codes*>(target)[lane] = codes[0];
        reinterpret_cast<Codes*>(target)[lane + kLanes] = codes[1];
        if (lane == 0) *params = quantizer.params;
    }
}

// Launches the vector kernel, or returns false.
template <class T>
bool rope_by_sixteen(const RopeArgs& args, const CacheView& cache, DType type, int layer,
                     cudaStream_t stream) {
    const int dim = cache.head_dim;
    if (2 * args.half != dim || (cache.bits >= 16 && cache.dtype != type)) return false;
    const auto run = [&]<int D, int Bits>() {
        const int64_t threads = int64_t(args.tokens) * (args.num_heads + 2 * cache.heads) * (D / 16);
        launch_overlapped(
            args.q_norm ? rope_cache_16_kernel<T, D, Bits, true> : rope_cache_16_kernel<T, D, Bits, false>,
            dim3(blocks_for(threads, kWarps * 32)), kWarps * 32, 0, stream, "rope_and_cache", args, cache,
            layer);
        return true;
    };
    const auto run_for = [&]<int D>() {
        return cache.bits == 8   ? run.template operator()<D, 8>()
               : cache.bits == 4 ? run.template operator()<D, 4>()
                                 : run.template operator()<D, 16>();
    };
    if (dim == 64) return run_for.template operator()<64>();
    if (dim == 128) return run_for.template operator()<128>();
    if (dim == 256) return run_for.template operator()<256>();
    return false;
}

}  // namespace

void rope_and_cache(DType type, const RopeArgs& args, const CacheView& cache, int layer,
                    cudaStream_t stream) {
    if (args.tokens == 0) return;
    if (cache.head_dim > kMaxDim) throw std::invalid_argument("head_dim is larger than 256");
    bool done = false;
    if (type == DType::F16) done = rope_by_sixteen<__half>(args, cache, type, layer, stream);
    if (type == DType::BF16) done = rope_by_sixteen<__nv_bfloat16>(args, cache, type, layer, stream);
    if (done) return;
    const dim3 grid(args.tokens, blocks_for(args.num_heads + 2 * cache.heads, kWarps));
    with_type(type, [&]<class T>() {
        launch_overlapped(rope_cache_kernel<T>, grid, kWarps * 32, 0, stream, "rope_and_cache", args, cache,
                          layer);
    });
}

}  // namespace turbomill::cuda
