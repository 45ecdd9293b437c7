// Words of codes as fragments in 16 bits, for the rows g and g + 8 that a lane owns. Parameters are pairs: of
// row g in the low half of a word, of row g + 8 in the high one.
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

// Makes code - zero of a word's eight codes, exactly.
template <class T>
class ShiftedCodes;

// A code in the low bits of 1024 = 0x6400 reads 1024 + code; four bits higher, 1024 + 16 code.
template <>
class ShiftedCodes<__half> {
  public:
    using Two = __half2;
    static constexpr unsigned kEight = 0x48004800u;  // the zeros of a weight without

    __device__ explicit ShiftedCodes(unsigned zeros) {
        const __half2 z = reinterpret_cast<const __half2&>(zeros);
        low_ = __hadd2(__low2half2(z), __float2half2_rn(1024.f));
        high_ = __hsub2(__float2half2_rn(-64.f), __high2half2(z));
    }

    __device__ void operator()(unsigned word, __half2 (&a)[4]) const {
        const __half2 sixteenth = __float2half2_rn(0.0625f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned low = masked_or<0x000f000f>(word, 0x64006400u),
                           high = masked_or<0x00f000f0>(word, 0x64006400u);
            a[2 * i] = __hsub2(reinterpret_cast<const __half2&>(low), low_);
            a[2 * i + 1] = __hfma2(reinterpret_cast<const __half2&>(high), sixteenth, high_);
            word >>= 8;
        }
    }

  private:
    __half2 low_, high_;
};

// bfloat16 has room for one nibble only: 128 = 0x4300 with a code in its low bits reads 128 + code.
template <>
class ShiftedCodes<__nv_bfloat16> {
  public:
    using Two = __nv_bfloat162;
    static constexpr unsigned kEight = 0x41004100u;

    __device__ explicit ShiftedCodes(unsigned zeros) {
        const __nv_bfloat162 z = reinterpret_cast<const __nv_bfloat162&>(zeros),
                             base = __float2bfloat162_rn(128.f);
        low_ = __hadd2(__low2bfloat162(z), base);
        high_ = __hadd2(__high2bfloat162(z), base);
    }

    __device__ void operator()(unsigned word, __nv_bfloat162 (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned bits = masked_or<0x000f000f>(word, 0x43004300u);
            a[i] = __hsub2(reinterpret_cast<const __nv_bfloat162&>(bits), i % 2 ? high_ : low_);
            word >>= 4;
        }
    }

  private:
    __nv_bfloat162 low_, high_;
};

__device__ inline __half2 low_twice(__half2 v) {
    return __low2half2(v);
}
__device__ inline __half2 high_twice(__half2 v) {
    return __high2half2(v);
}
__device__ inline __nv_bfloat162 low_twice(__nv_bfloat162 v) {
    return __low2bfloat162(v);
}
__device__ inline __nv_bfloat162 high_twice(__nv_bfloat162 v) {
    return __high2bfloat162(v);
}

// Makes (code - zero) * scale, rounded to T.
template <class T>
class ScaledCodes {
  public:
    using Two = typename ShiftedCodes<T>::Two;

    __device__ ScaledCodes(unsigned scales, unsigned zeros) : shifted_(zeros) {
        const Two s = reinterpret_cast<const Two&>(scales);
        low_ = low_twice(s), high_ = high_twice(s);
    }

    __device__ void operator()(unsigned word, unsigned (&a)[4]) const {
        Two w[4];
        shifted_(word, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            w[i] = __hmul2(w[i], i % 2 ? high_ : low_);
            a[i] = reinterpret_cast<const unsigned&>(w[i]);
        }
    }

  private:
    ShiftedCodes<T> shifted_;
    Two low_, high_;
};

}  // namespace turbomill::cuda
