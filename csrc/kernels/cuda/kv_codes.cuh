// Codes of a quantized cache as 16-bit values.
#pragma once

#include <type_traits>

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/mma.cuh"

namespace turbomill::cuda {

// Eight codes, one to a byte, as T: code * scale + zero, rounded once.
template <class T>
__device__ inline uint4 dequantize(uint2 codes, __half2 params);

// 0x6400 with a byte below reads 1024 + byte in float16.
template <>
__device__ inline uint4 dequantize<__half>(uint2 codes, __half2 params) {
    const __half2 scale = __low2half2(params), zero = __high2half2(params), base = __float2half2_rn(1024.f);
    const auto pair = [&](unsigned word, unsigned selector) {
        const unsigned bits = __byte_perm(word, 0x64646464u, selector);
        const __half2 v = __hfma2(__hsub2(reinterpret_cast<const __half2&>(bits), base), scale, zero);
        return reinterpret_cast<const unsigned&>(v);
    };
    return make_uint4(pair(codes.x, 0x4140), pair(codes.x, 0x4342), pair(codes.y, 0x4140),
                      pair(codes.y, 0x4342));
}

// 0x4b000000 with a byte below reads 2^23 + byte in float32.
template <>
__device__ inline uint4 dequantize<__nv_bfloat16>(uint2 codes, __half2 params) {
    const float2 p = __half22float2(params);
    const auto value = [&](unsigned word, unsigned selector) {
        return (__uint_as_float(__byte_perm(word, 0x4b000000u, selector)) - 8388608.f) * p.x + p.y;
    };
    const auto pair = [&](unsigned word, unsigned low, unsigned high) {
        return pack_pair<__nv_bfloat16>(value(word, low), value(word, high));
    };
    return make_uint4(pair(codes.x, 0x7440, 0x7441), pair(codes.x, 0x7442, 0x7443),
                      pair(codes.y, 0x7440, 0x7441), pair(codes.y, 0x7442, 0x7443));
}

// Eight codes to eight bytes.
__device__ inline uint2 spread(uint2 bytes) {
    return bytes;
}
__device__ inline uint2 spread(unsigned word) {  // nibbles, lowest first
    const unsigned even = word & 0x0f0f0f0fu, odd = (word >> 4) & 0x0f0f0f0fu;
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// Eight fp8 codes, likewise.
template <class T, KvFormat F>
__device__ inline uint4 dequantize_fp8(uint2 codes, __half2 params) {
    const float scale = __low2float(params) * (F == KvFormat::E4M3 ? kE4M3Unit : 1.f);
    const auto pair = [&](unsigned word, unsigned selector) {
        const unsigned upper = __byte_perm(word, 0u, selector);
        const unsigned bits = F == KvFormat::E4M3 ? e4m3_bits(upper) : upper;
        const float2 v = __half22float2(reinterpret_cast<const __half2&>(bits));
        return pack_pair<T>(v.x * scale, v.y * scale);
    };
    return make_uint4(pair(codes.x, 0x1404), pair(codes.x, 0x3424), pair(codes.y, 0x1404),
                      pair(codes.y, 0x3424));
}

template <KvFormat F>
using EightCodes = std::conditional_t<F == KvFormat::Int4, unsigned, uint2>;

// Eight codes of a format as T.
template <class T, KvFormat F>
__device__ inline uint4 dequantize(EightCodes<F> codes, __half2 params) {
    if constexpr (kIsFp8<F>) {
        return dequantize_fp8<T, F>(codes, params);
    } else {
        return dequantize<T>(spread(codes), params);
    }
}

}  // namespace turbomill::cuda
