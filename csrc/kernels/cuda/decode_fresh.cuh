// The new token of a decode, inside attention_decode: the warp that attends to it rotates its key, writes
// both rows to the cache for later steps, and puts them into its tile, which was read from the cache before.
// What rope_and_cache does otherwise, rounding for rounding.
#pragma once

#include <type_traits>

#include "kernels/cuda/decode_tile.cuh"
#include "kernels/cuda/hadamard.cuh"

namespace turbomill::cuda {

// A row of D elements over a warp: lane l holds the D / 32 from l * D / 32 on.
template <int D>
using WarpRow = float[D / 32];

template <class T, int D>
__device__ inline void load_row(const T* row, WarpRow<D>& v) {
#pragma unroll
    for (int i = 0; i < D / 32; i += 2) {
        const float2 both = Pair<T>::unpack(
            *reinterpret_cast<const typename Pair<T>::type*>(row + threadIdx.x % 32 * (D / 32) + i));
        v[i] = both.x, v[i + 1] = both.y;
    }
}

// cos, sin [D / 2] of the token's position.
template <int D>
__device__ inline void rotate_row(const float* cos, const float* sin, WarpRow<D>& v) {
    const int lane = threadIdx.x % 32, first = lane % 16 * (D / 32);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        const float other = __shfl_xor_sync(kFullWarp, v[i], 16);
        const float c = cos[first + i], s = sin[first + i];
        v[i] = lane < 16 ? v[i] * c - other * s : v[i] * c + other * s;
    }
}

// The cache's rotation of a row; D is a power of two.
template <int D>
__device__ inline void hadamard_row(WarpRow<D>& v) {
    hadamard_lanes<D / 32, 32>(v, kFullWarp);
    const float unit = 1.f / sqrtf(float(D));
#pragma unroll
    for (int i = 0; i < D / 32; ++i) v[i] *= unit;
}

// A new token's key or value as the cache holds it, in shared memory.
template <KvFormat F, int D>
struct FreshRow {
    using Format = DecodeFormat<F, D>;
    static constexpr int kBytes = D / 32 * Format::kBits / 8;  // of a lane
    using Small =
        std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
    using Word = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, Small>>;

    Word words[32];
    __half2 params;

    // By one warp: v, here and at `row` and `param` of the cache.
    template <class T>
    __device__ void store(const WarpRow<D>& v, uint8_t* row, __half2* param) {
        const int lane = threadIdx.x % 32;
        Word word;
        if constexpr (Format::kPlain) {
            T* elements = reinterpret_cast<T*>(&word);
#pragma unroll
            for (int i = 0; i < D / 32; ++i) elements[i] = from_float<T>(v[i]);
        } else {
            float low = v[0], high = v[0];
#pragma unroll
            for (int i = 1; i < D / 32; ++i) low = fminf(low, v[i]), high = fmaxf(high, v[i]);
            const Quantizer quantizer(warp_min(low), warp_max(high), F);
            using Codes = std::conditional_t<kBytes == 8, uint64_t, unsigned>;
            Codes codes = 0;
#pragma unroll
            for (int i = 0; i < D / 32; ++i) codes |= Codes(quantizer.code(v[i])) << (Format::kBits * i);
            if constexpr (kBytes == 8) {
                word = make_uint2(unsigned(codes), unsigned(codes >> 32));
            } else {
                word = Word(codes);
            }
            if (lane == 0) *param = params = quantizer.params;
        }
        words[lane] = word;
        reinterpret_cast<Word*>(row)[lane] = word;
    }

    // By the same warp: row `row` of a tile.
    __device__ void patch(uint8_t* tile, int row) const {
        const int lane = threadIdx.x % 32, at = lane * kBytes;
        *reinterpret_cast<Word*>(tile + 16 * swizzled<Format::kChunks>(row, at / 16) + at % 16) = words[lane];
    }
};

template <int Policy, int D>
struct FreshRows {
    FreshRow<kKeyFormat<Policy>, D> key;
    FreshRow<kValueFormat<Policy>, D> value;

    // Row `row` of a tile of keys, the tile of values behind it, and their parameters.
    template <int Keys>
    __device__ void patch(uint8_t* stage, int row) const {
        constexpr int kKeys = Keys * decltype(key)::Format::kRow,
                      kValues = Keys * decltype(value)::Format::kRow;
        key.patch(stage, row);
        value.patch(stage + kKeys, row);
        const int lane = threadIdx.x % 32;
        if (Policy && lane < 2)
            reinterpret_cast<__half2*>(stage + kKeys + kValues)[lane * Keys + row] =
                lane ? value.params : key.params;
        __syncwarp();
    }
};

}  // namespace turbomill::cuda
