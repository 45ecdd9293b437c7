// Words of 8-bit codes, of one row of N each, as 16-bit fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace turbomill::cuda {

// What turns a word into the pairs of its columns (2t, 2t + 1) and (2t + 8, 2t + 9): code - zero, divided by
// kFactor. Exact, as a difference of two codes has at most eight significant bits.
template <class T>
class ByteShift;

// A byte in the low bits of 1024 = 0x6400 reads 1024 + code.
template <>
class ByteShift<__half> {
  public:
    static constexpr float kFactor = 1.f;
    static constexpr unsigned kMiddle = 0x58005800u;  // the zeros of a weight without

    __device__ explicit ByteShift(float zero) : offset_(__float2half2_rn(1024.f + zero)) {}
    __device__ explicit ByteShift(__half2 zero) : offset_(__hadd2(zero, __float2half2_rn(1024.f))) {}

    __device__ void operator()(unsigned word, unsigned& near, unsigned& far) const {
        near = shifted(__byte_perm(word, 0x64646464u, 0x4240));
        far = shifted(__byte_perm(word, 0x64646464u, 0x4341));
    }

  private:
    __device__ unsigned shifted(unsigned bits) const {
        const __half2 v = __hsub2(reinterpret_cast<const __half2&>(bits), offset_);
        return reinterpret_cast<const unsigned&>(v);
    }

    __half2 offset_;
};

// bfloat16 has no such number: its 1 + 7 bits do not hold a byte above a power of two. But a byte alone reads
// code * 2^-133, the spacing of subnormal numbers, which the smallest normal ones have too. Times 2^127, the
// greatest power there is, that leaves 2^-6.
template <>
class ByteShift<__nv_bfloat16> {
  public:
    static constexpr float kFactor = 64.f;
    static constexpr unsigned kMiddle = 0x43004300u;

    __device__ explicit ByteShift(float zero) : offset_(__float2bfloat162_rn(zero * (-1.f / kFactor))) {}
    __device__ explicit ByteShift(__nv_bfloat162 zero)
        : offset_(__hmul2(zero, __float2bfloat162_rn(-1.f / kFactor))) {}

    __device__ void operator()(unsigned word, unsigned& near, unsigned& far) const {
        near = shifted(word & 0x00ff00ffu);
        far = shifted(__byte_perm(word, 0u, 0x4341));
    }

  private:
    __device__ unsigned shifted(unsigned bits) const {
        constexpr unsigned kPower = 0x7f007f00u;  // 2^127, twice
        const __nv_bfloat162 v = __hfma2(reinterpret_cast<const __nv_bfloat162&>(bits),
                                         reinterpret_cast<const __nv_bfloat162&>(kPower), offset_);
        return reinterpret_cast<const unsigned&>(v);
    }

    __nv_bfloat162 offset_;
};

}  // namespace turbomill::cuda
