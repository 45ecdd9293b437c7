// How the fused kernels read codes of 4 or 8 bits, and make fragments of them in 16 bits, for the rows g and
// g + 8 of a sub-tile that lane 4g + t owns. Parameters are pairs: of row g in the low half of a word, of row
// g + 8 in the high one.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/w8_fragment.cuh"

namespace turbomill::cuda {

// A tile of 64 x 64 codes: its bytes, how the copy engine brings it to shared memory, what a lane reads of
// it.
template <int Bits>
struct CodeTile;

// As it lies in the store.
template <>
struct CodeTile<4> {
    static constexpr int kBytes = 2048;
    static constexpr int kMapDims = 3;  // [N/64, K/64, 2048 bytes]

    // Tiles from k of K and n of N on.
    __device__ static void copy(unsigned to, const CUtensorMap& map, int k, int n, unsigned barrier) {
        copy_box(to, map, 0, k, n, barrier);
    }
    // Where a lane's codes begin, sub-tile `sub`.
    __device__ static unsigned lane_at(int sub, int lane) { return sub * 512 + lane * 16; }

    uint4 words;  // of 16 columns of both rows each

    __device__ void read(unsigned at) { words = load_shared_16(at); }
    __device__ unsigned word(int j) const {
        return j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
    }
};

// Rows of 128 bytes of a sub-tile, g's and g + 8's, even ones first, in the copy engine's 128-byte swizzle,
// so that eight lanes that read at once, of two neighbours of g, meet all banks.
template <>
struct CodeTile<8> {
    static constexpr int kBytes = 4096;
    static constexpr int kMapDims = 5;  // [N/64, sub-tiles of K, odd or even, 4, 128 bytes]

    __device__ static void copy(unsigned to, const CUtensorMap& map, int k, int n, unsigned barrier) {
        copy_box(to, map, 0, 0, 0, 4 * k, n, barrier);
    }
    __device__ static unsigned lane_at(int sub, int lane) {
        const int g = lane / 4, t = lane % 4, row = g % 2 * 4 + g / 2;
        return sub * 1024 + row * 128 + (t ^ row) * 16;
    }

    uint4 rows[2];  // words of 16 columns each

    __device__ void read(unsigned at) {
        rows[0] = load_shared_16(at);
        rows[1] = load_shared_16(at ^ 64);
    }
    __device__ unsigned word(int h, int j) const {
        return j == 0 ? rows[h].x : j == 1 ? rows[h].y : j == 2 ? rows[h].z : rows[h].w;
    }
};

// word & Mask | base, in one instruction: left alone, the compiler takes two, for want of a second immediate.
template <unsigned Mask>
__device__ inline unsigned masked_or(unsigned word, unsigned base) {
    unsigned bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "n"(Mask), "r"(base));
    return bits;
}

// Makes code - zero of a lane's codes of 16 columns, exactly, divided by kFactor.
template <class T, int Bits>
class ShiftedCodes;

// A code in the low bits of 1024 = 0x6400 reads 1024 + code; four bits higher, 1024 + 16 code.
template <>
class ShiftedCodes<__half, 4> {
  public:
    using Two = __half2;
    static constexpr float kFactor = 1.f;
    static constexpr unsigned kMiddle = 0x48004800u;  // the zeros of a weight without

    __device__ explicit ShiftedCodes(unsigned zeros) {
        const __half2 z = reinterpret_cast<const __half2&>(zeros);
        low_ = __hadd2(__low2half2(z), __float2half2_rn(1024.f));
        high_ = __hsub2(__float2half2_rn(-64.f), __high2half2(z));
    }

    __device__ void operator()(const CodeTile<4>& codes, int j, __half2 (&a)[4]) const {
        unsigned word = codes.word(j);
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
class ShiftedCodes<__nv_bfloat16, 4> {
  public:
    using Two = __nv_bfloat162;
    static constexpr float kFactor = 1.f;
    static constexpr unsigned kMiddle = 0x41004100u;

    __device__ explicit ShiftedCodes(unsigned zeros) {
        const __nv_bfloat162 z = reinterpret_cast<const __nv_bfloat162&>(zeros),
                             base = __float2bfloat162_rn(128.f);
        low_ = __hadd2(__low2bfloat162(z), base);
        high_ = __hadd2(__high2bfloat162(z), base);
    }

    __device__ void operator()(const CodeTile<4>& codes, int j, __nv_bfloat162 (&a)[4]) const {
        unsigned word = codes.word(j);
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

template <class T>
class ShiftedCodes<T, 8> {
  public:
    using Two = typename Pair<T>::type;
    static constexpr float kFactor = ByteShift<T>::kFactor;
    static constexpr unsigned kMiddle = ByteShift<T>::kMiddle;

    __device__ explicit ShiftedCodes(unsigned zeros)
        : low_(low_twice(reinterpret_cast<const Two&>(zeros))),
          high_(high_twice(reinterpret_cast<const Two&>(zeros))) {}

    __device__ void operator()(const CodeTile<8>& codes, int j, Two (&a)[4]) const {
        unsigned bits[4];
        low_(codes.word(0, j), bits[0], bits[2]);
        high_(codes.word(1, j), bits[1], bits[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = reinterpret_cast<const Two&>(bits[i]);
    }

  private:
    ByteShift<T> low_, high_;
};

// Makes (code - zero) * scale, or, where Minima are allowed, that plus a minimum, rounded to T.
template <class T, int Bits, bool Minima>
class ScaledCodes {
  public:
    using Shifted = ShiftedCodes<T, Bits>;
    using Two = typename Shifted::Two;

    __device__ ScaledCodes(unsigned scales, unsigned zeros, unsigned mins) : shifted_(zeros) {
        Two s = reinterpret_cast<const Two&>(scales);
        if constexpr (Shifted::kFactor != 1.f)
            s = __hmul2(s, Pair<T>::pack(Shifted::kFactor, Shifted::kFactor));
        low_ = low_twice(s), high_ = high_twice(s);
        if constexpr (Minima) {
            const Two m = reinterpret_cast<const Two&>(mins);
            low_min_ = low_twice(m), high_min_ = high_twice(m);
        }
    }

    // Of columns 16j to 16j + 15, a lane's fragment.
    __device__ void operator()(const CodeTile<Bits>& codes, int j, unsigned (&a)[4]) const {
        Two w[4];
        shifted_(codes, j, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Two scale = i % 2 ? high_ : low_;
            if constexpr (Minima) {
                w[i] = __hfma2(w[i], scale, i % 2 ? high_min_ : low_min_);
            } else {
                w[i] = __hmul2(w[i], scale);
            }
            a[i] = reinterpret_cast<const unsigned&>(w[i]);
        }
    }

  private:
    Shifted shifted_;
    Two low_, high_;
    Two low_min_, high_min_;
};

}  // namespace turbomill::cuda
