// Words of codes as weights in 16 bits: (code - zero) * scale for the rows g and g + 8 that a lane owns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace turbomill::cuda {

// word & Mask | base, in one instruction: left alone, the compiler takes two, for want of a second immediate.
template <unsigned Mask>
__device__ inline unsigned masked_or(unsigned word, unsigned base) {
    unsigned bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "n"(Mask), "r"(base));
    return bits;
}

// Made of two values each: of row g in the low half, of row g + 8 in the high one. code - zero is exact, the
// product with the scale is rounded to T.
template <class T>
class ScaledCodes;

// A code in the low bits of 1024 = 0x6400 reads 1024 + code; four bits higher, 1024 + 16 code.
template <>
class ScaledCodes<__half> {
  public:
    static constexpr unsigned kEight = 0x48004800u;

    __device__ ScaledCodes(unsigned scales, unsigned zeros) {
        const __half2 s = reinterpret_cast<const __half2&>(scales), z = reinterpret_cast<const __half2&>(zeros);
        scale_low_ = __low2half2(s);
        scale_high_ = __high2half2(s);
        low_ = __hadd2(__low2half2(z), __float2half2_rn(1024.f));
        high_ = __hsub2(__float2half2_rn(-64.f), __high2half2(z));
    }

    __device__ void operator()(unsigned word, unsigned (&a)[4]) const {
        const __half2 sixteenth = __float2half2_rn(0.0625f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned low = masked_or<0x000f000f>(word, 0x64006400u),
                           high = masked_or<0x00f000f0>(word, 0x64006400u);
            const __half2 x = __hmul2(__hsub2(reinterpret_cast<const __half2&>(low), low_), scale_low_);
            const __half2 y =
                __hmul2(__hfma2(reinterpret_cast<const __half2&>(high), sixteenth, high_), scale_high_);
            a[2 * i] = reinterpret_cast<const unsigned&>(x);
            a[2 * i + 1] = reinterpret_cast<const unsigned&>(y);
            word >>= 8;
        }
    }

  private:
    __half2 scale_low_, scale_high_, low_, high_;
};

// bfloat16 has room for one nibble only: 128 = 0x4300 with a code in its low bits reads 128 + code.
template <>
class ScaledCodes<__nv_bfloat16> {
  public:
    static constexpr unsigned kEight = 0x41004100u;

    __device__ ScaledCodes(unsigned scales, unsigned zeros) {
        const __nv_bfloat162 s = reinterpret_cast<const __nv_bfloat162&>(scales),
                             z = reinterpret_cast<const __nv_bfloat162&>(zeros);
        const __nv_bfloat162 base = __float2bfloat162_rn(128.f);
        scale_low_ = __low2bfloat162(s);
        scale_high_ = __high2bfloat162(s);
        low_ = __hadd2(__low2bfloat162(z), base);
        high_ = __hadd2(__high2bfloat162(z), base);
    }

    __device__ void operator()(unsigned word, unsigned (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned bits = masked_or<0x000f000f>(word, 0x43004300u);
            const __nv_bfloat162 v = __hmul2(
                __hsub2(reinterpret_cast<const __nv_bfloat162&>(bits), i % 2 ? high_ : low_),
                i % 2 ? scale_high_ : scale_low_);
            a[i] = reinterpret_cast<const unsigned&>(v);
            word >>= 4;
        }
    }

  private:
    __nv_bfloat162 scale_low_, scale_high_, low_, high_;
};

}  // namespace turbomill::cuda
