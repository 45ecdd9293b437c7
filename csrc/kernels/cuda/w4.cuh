// Reading the store's w4.n64k64 weights: one 32-bit word of codes is one A fragment of mma.m16n8k16.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"

namespace turbomill::cuda {

// What turns a fragment's codes into code - zero, exactly: zeros of rows g (x) and g + 8 (y).
template <class T>
class CodeShift;

// A code in the low bits of 1024 = 0x6400 reads 1024 + code; four bits higher, 1024 + 16 code.
template <>
class CodeShift<__half> {
  public:
    __device__ explicit CodeShift(float2 zeros)
        : low_(__float2half2_rn(1024.f + zeros.x)), high_(__float2half2_rn(-64.f - zeros.y)) {}

    __device__ void operator()(unsigned word, unsigned (&a)[4]) const {
        const __half2 sixteenth = __float2half2_rn(0.0625f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned low = (word & 0x000f000fu) | 0x64006400u,
                           high = (word & 0x00f000f0u) | 0x64006400u;
            const __half2 x = __hsub2(reinterpret_cast<const __half2&>(low), low_);
            const __half2 y = __hfma2(reinterpret_cast<const __half2&>(high), sixteenth, high_);
            a[2 * i] = reinterpret_cast<const unsigned&>(x);
            a[2 * i + 1] = reinterpret_cast<const unsigned&>(y);
            word >>= 8;
        }
    }

  private:
    __half2 low_, high_;
};

// bfloat16 has room for one nibble only: 128 = 0x4300 with a code in its low bits reads 128 + code.
template <>
class CodeShift<__nv_bfloat16> {
  public:
    __device__ explicit CodeShift(float2 zeros)
        : low_(__float2bfloat162_rn(-128.f - zeros.x)), high_(__float2bfloat162_rn(-128.f - zeros.y)) {}

    __device__ void operator()(unsigned word, unsigned (&a)[4]) const {
        const __nv_bfloat162 one = __float2bfloat162_rn(1.f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned bits = (word & 0x000f000fu) | 0x43004300u;
            const __nv_bfloat162 v =
                __hfma2(reinterpret_cast<const __nv_bfloat162&>(bits), one, i % 2 ? high_ : low_);
            a[i] = reinterpret_cast<const unsigned&>(v);
            word >>= 4;
        }
    }

  private:
    __nv_bfloat162 low_, high_;
};

// Scales or zeros of rows (g, g + 8) of sub-tile `sub`, from [N/64, groups, 64] in pair order.
__device__ inline float2 w4_params(const W4View& w, const void* base, int tile, int group, int sub, int g) {
    const int64_t at = (int64_t(tile) * w.groups + group) * 32 + 8 * sub + g;
    const unsigned bits = __ldg(static_cast<const unsigned*>(base) + at);
    if (w.bf16_params) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
    return __half22float2(reinterpret_cast<const __half2&>(bits));
}

__device__ inline float2 w4_zeros(const W4View& w, int tile, int group, int sub, int g) {
    return w.zeros ? w4_params(w, w.zeros, tile, group, sub, g) : make_float2(8.f, 8.f);
}

}  // namespace turbomill::cuda
