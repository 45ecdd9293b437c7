// Rotary embedding and the cache write, one warp for each token and head.
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
    if (rotates) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (lane + 32 * i < d) row[lane + 32 * i] = from_float<T>(v[i]);
    }
    if (head < a.num_heads || slice < 0) return;
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

}  // namespace

void rope_and_cache(DType type, const RopeArgs& args, const CacheView& cache, int layer,
                    cudaStream_t stream) {
    if (args.tokens == 0) return;
    if (cache.head_dim > kMaxDim) throw std::invalid_argument("head_dim is larger than 256");
    const dim3 grid(args.tokens, blocks_for(args.num_heads + 2 * cache.heads, kWarps));
    with_type(type, [&]<class T>() {
        launch_overlapped(rope_cache_kernel<T>, grid, kWarps * 32, 0, stream, "rope_and_cache", args, cache,
                          layer);
    });
}

}  // namespace turbomill::cuda
