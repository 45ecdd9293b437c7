// Reading and addressing the paged KV cache in kernels.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

// Row of K (0) or V (1) of one token and head.
__device__ inline uint8_t* cache_row(const CacheView& c, int layer, int block, int value, int head,
                                     int place) {
    return c.data + block * c.block_bytes + layer * c.layer_bytes +
           int64_t(value * c.heads + head) * c.head_bytes + int64_t(place) * c.row_bytes;
}

// Its (scale, zero), for a quantized cache.
__device__ inline __half2* cache_params(const CacheView& c, int layer, int block, int value, int head,
                                        int place) {
    uint8_t* base =
        c.data + block * c.block_bytes + layer * c.layer_bytes + 2 * int64_t(c.heads) * c.head_bytes;
    return reinterpret_cast<__half2*>(base + int64_t(value * c.heads + head) * c.param_bytes) + place;
}

// A row's parameters and codes from its least and greatest element: the arithmetic of the CPU's kv_quantize,
// rounding for rounding, so that codes are equal for equal inputs.
struct Quantizer {
    __half2 params;  // (scale, zero)
    float zero, inverse, top;

    __device__ Quantizer(float low, float high, int levels) {
        const float scale = __fdiv_rn(high - low, float(levels));
        params = __halves2half2(__float2half_rn(scale), __float2half_rn(low));
        const float2 rounded = __half22float2(params);
        zero = rounded.y;
        inverse = rounded.x > 0.f ? __fdiv_rn(1.f, rounded.x) : 0.f;
        top = float(levels);
    }

    __device__ int code(float v) const {
        const float level = __fmul_rn(v - zero, inverse);
        return level <= 0.f ? 0 : level >= top ? int(top) : int(__fadd_rn(level, 0.5f));
    }
};

// Elements [8 chunk, 8 chunk + 8) of a row as fp32. The format is the same for all threads of a launch.
__device__ inline void load_chunk(const CacheView& c, const uint8_t* row, const __half2* params, int chunk,
                                  float* out) {
    if (c.bits == 8) {
        const uint2 words = *reinterpret_cast<const uint2*>(row + 8 * chunk);
        const float2 p = __half22float2(*params);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned code = ((i < 4 ? words.x : words.y) >> (8 * (i % 4))) & 255u;
            out[i] = float(code) * p.x + p.y;
        }
    } else if (c.bits == 4) {
        const unsigned word = *reinterpret_cast<const unsigned*>(row + 4 * chunk);
        const float2 p = __half22float2(*params);
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = float((word >> (4 * i)) & 15u) * p.x + p.y;
    } else if (c.dtype == DType::F32) {
        const float4* source = reinterpret_cast<const float4*>(row) + 2 * chunk;
        const float4 a = source[0], b = source[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
        const uint4 words = reinterpret_cast<const uint4*>(row)[chunk];
        const unsigned w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 pair;
            if (c.dtype == DType::F16) {
                pair = __half22float2(reinterpret_cast<const __half2&>(w[i]));
            } else {
                pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(w[i]));
            }
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
}

}  // namespace turbomill::cuda
