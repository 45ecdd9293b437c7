// Reading and addressing the paged KV cache in kernels.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

// Row of K (0) or V (1) of one token and head.
__device__ inline uint8_t* cache_row(const CacheView& c, int block, int value, int head, int place) {
    // Not by index: these lie among a kernel's parameters.
    const int head_bytes = value ? c.head_bytes[1] : c.head_bytes[0];
    const int row_bytes = value ? c.row_bytes[1] : c.row_bytes[0];
    return c.data + block * c.block_bytes + (value ? int64_t(c.heads) * c.head_bytes[0] : 0) +
           int64_t(head) * head_bytes + int64_t(place) * row_bytes;
}

// Its (scale, zero), for a quantized cache.
__device__ inline __half2* cache_params(const CacheView& c, int block, int value, int head, int place) {
    uint8_t* base = c.data + block * c.block_bytes + int64_t(c.heads) * (c.head_bytes[0] + c.head_bytes[1]);
    return reinterpret_cast<__half2*>(base + int64_t(value * c.heads + head) * c.param_bytes) + place;
}

// Formats of a policy's keys and values.
template <int Policy>
constexpr KvFormat kKeyFormat = kv_formats(Policy).key;
template <int Policy>
constexpr KvFormat kValueFormat = kv_formats(Policy).value;

template <KvFormat Format>
constexpr int kCodeBits = code_bits(Format);
template <KvFormat Format>
constexpr bool kIsFp8 = Format == KvFormat::E4M3 || Format == KvFormat::E5M2;
__device__ inline bool is_fp8(KvFormat format) {
    return format == KvFormat::E4M3 || format == KvFormat::E5M2;
}

// Of |v| <= kFp8Top, to the nearest, ties to even; `mantissa`: its bits.
__device__ inline unsigned fp8_code(float v, int mantissa) {
    const int dropped = 23 - mantissa, bias = mantissa == 3 ? 7 : 15;
    const unsigned bits = __float_as_uint(v), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    const float size = __uint_as_float(magnitude);
    const float step = __uint_as_float(unsigned(127 + 1 - bias - mantissa) << 23);  // of subnormals
    if (size < step * float(1 << mantissa)) return sign | unsigned(rintf(size / step));
    const unsigned rounded = magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1u);
    return sign | ((rounded >> dropped) - (unsigned(127 - bias) << mantissa));
}

// A row's parameters and codes from its least and greatest element: the arithmetic of the CPU's kv_quantize,
// rounding for rounding, so that codes are equal for equal inputs. The format is the same for all threads.
struct Quantizer {
    __half2 params;  // (scale, zero)
    float zero, inverse, top;
    KvFormat format;

    __device__ Quantizer(float low, float high, KvFormat f)
        : top(is_fp8(f)             ? kFp8Top
              : f == KvFormat::Int8 ? 255.f
                                    : 15.f),
          format(f) {
        const float range = is_fp8(f) ? fmaxf(fabsf(low), fabsf(high)) : high - low;
        const float scale = __fdiv_rn(range, top);
        params = __halves2half2(__float2half_rn(scale), __float2half_rn(is_fp8(f) ? 0.f : low));
        const float2 rounded = __half22float2(params);
        zero = rounded.y;
        inverse = rounded.x > 0.f ? __fdiv_rn(1.f, rounded.x) : 0.f;
    }

    __device__ unsigned code(float v) const {
        if (is_fp8(format)) {
            const float level = fminf(fmaxf(__fmul_rn(v, inverse), -top), top);
            return fp8_code(level, format == KvFormat::E4M3 ? 3 : 2);
        }
        const float level = __fmul_rn(v - zero, inverse);
        return level <= 0.f ? 0u : level >= top ? unsigned(top) : unsigned(__fadd_rn(level, 0.5f));
    }
};

// Bits that fp8 codes become as float16: e4m3's are then too small by kE4M3Unit.
constexpr float kE4M3Unit = 256.f;
__device__ inline unsigned e4m3_bits(unsigned pair) {  // two codes, each the upper byte of its half
    return (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
}
__device__ inline float fp8_value(unsigned code, KvFormat format) {
    const unsigned bits = code << 8;
    const __half2_raw raw{static_cast<unsigned short>(format == KvFormat::E4M3 ? e4m3_bits(bits) : bits), 0};
    return __half2float(__low2half(__half2(raw))) * (format == KvFormat::E4M3 ? kE4M3Unit : 1.f);
}

// Elements [8 chunk, 8 chunk + 8) of a row of K (0) or V (1) as fp32.
__device__ inline void load_chunk(const CacheView& c, int value, const uint8_t* row, const __half2* params,
                                  int chunk, float* out) {
    const KvFormat format = value ? c.format[1] : c.format[0];
    if (is_fp8(format)) {
        const uint2 words = *reinterpret_cast<const uint2*>(row + 8 * chunk);
        const float scale = __low2float(*params);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            out[i] = fp8_value(((i < 4 ? words.x : words.y) >> (8 * (i % 4))) & 255u, format) * scale;
    } else if (format == KvFormat::Int8) {
        const uint2 words = *reinterpret_cast<const uint2*>(row + 8 * chunk);
        const float2 p = __half22float2(*params);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned code = ((i < 4 ? words.x : words.y) >> (8 * (i % 4))) & 255u;
            out[i] = float(code) * p.x + p.y;
        }
    } else if (format == KvFormat::Int4) {
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
