// Tiles of cached keys and values as attention_decode sees them: copied into shared memory as they are
// stored, and turned into tensor-core fragments on the way into registers, without arithmetic on elements.
//
// An integer code c is given to the tensor cores as the float16 with the bits c: a subnormal, c * 2^-24
// exactly. Nibbles that stand four bits higher count sixteen-fold. The fields of an fp8 code, in the places
// of float16's, make the number itself (e5m2) or a 256th of it (e4m3). All factors are taken back by whoever
// knows the place: DecodeFormat's kUnit at the end, the sixteenth in the query (keys) or in the output
// (values).
//
// Rows lie in 16-byte chunks whose places are permuted (swizzled), so that neither the fragments of keys,
// which read a few rows at one place, nor those of values, which read eight rows at one chunk, meet a bank
// twice.
#pragma once

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/mma.cuh"

namespace turbomill::cuda {

template <int Chunks>
__device__ inline int swizzled(int row, int chunk) {
    static_assert((Chunks & (Chunks - 1)) == 0 && Chunks >= 2);
    constexpr int kMask = Chunks < 8 ? Chunks - 1 : 7, kShift = Chunks == 2 ? 2 : Chunks == 4 ? 1 : 0;
    return row * Chunks + (chunk ^ ((row >> kShift) & kMask));
}

// Whether attention_decode applies the cache's rotation to what it does inside: new tokens and outputs.
template <int Policy, int D>
constexpr bool kRotatesInside = Policy == 4 && D <= 128;

// Two codes of a word as two halves.
__device__ inline unsigned low_bytes(unsigned word) {  // bytes 0, 1
    return __byte_perm(word, 0u, 0x4140);
}
__device__ inline unsigned high_bytes(unsigned word) {  // bytes 2, 3
    return __byte_perm(word, 0u, 0x4342);
}
__device__ inline unsigned even_bytes(unsigned word) {  // bytes 0, 2
    return word & 0x00ff00ffu;
}
__device__ inline unsigned odd_bytes(unsigned word) {  // bytes 1, 3
    return __byte_perm(word, 0u, 0x4341);
}

// Two fp8 codes as two halves, likewise.
template <KvFormat F>
__device__ inline unsigned fp8_bits(unsigned upper_bytes) {
    return F == KvFormat::E4M3 ? e4m3_bits(upper_bytes) : upper_bytes;
}
template <KvFormat F>
__device__ inline unsigned low_codes(unsigned word) {
    if constexpr (kIsFp8<F>) return fp8_bits<F>(__byte_perm(word, 0u, 0x1404));
    return low_bytes(word);
}
template <KvFormat F>
__device__ inline unsigned high_codes(unsigned word) {
    if constexpr (kIsFp8<F>) return fp8_bits<F>(__byte_perm(word, 0u, 0x3424));
    return high_bytes(word);
}
template <KvFormat F>
__device__ inline unsigned even_codes(unsigned word) {
    if constexpr (kIsFp8<F>) return fp8_bits<F>(word << 8 & 0xff00ff00u);
    return even_bytes(word);
}
template <KvFormat F>
__device__ inline unsigned odd_codes(unsigned word) {
    if constexpr (kIsFp8<F>) return fp8_bits<F>(word & 0xff00ff00u);
    return odd_bytes(word);
}

// How D dimensions of a row of this format are spread over fragments.
template <KvFormat F, int D>
struct DecodeFormat {
    static constexpr bool kPlain = F == KvFormat::Plain, kNibbles = F == KvFormat::Int4;
    static constexpr int kBits = kPlain ? 16 : kCodeBits<F>;
    static constexpr int kRow = D * kBits / 8, kChunks = kRow / 16;
    // What a code's half is to be multiplied by.
    static constexpr float kUnit = kPlain || F == KvFormat::E5M2 ? 1.f
                                   : F == KvFormat::E4M3         ? kE4M3Unit
                                                                 : 16777216.f;
    static constexpr bool kHasZeros = F == KvFormat::Int8 || F == KvFormat::Int4;
    // Whether any bits make finite numbers.
    static constexpr bool kAlwaysFinite = !kPlain && F != KvFormat::E5M2;
    static constexpr int kOutputs = D / 16;  // tiles of 16 dimensions, as value_fragments numbers them

    // The query's side of key_fragments: lane 4g + t holds, for step s, register `pair`, half `half`, this
    // dimension, the j-th of those D / 4 that begin at t * D / 4 (quantized), divided by query_divisor.
    static constexpr __device__ int query_index(int s, int pair, int half) {
        return kNibbles ? 8 * (s / 2) + 2 * (s % 2) + pair + 4 * half : 4 * s + 2 * pair + half;
    }
    static constexpr __device__ float query_factor(int pair) { return kNibbles && pair == 1 ? 0.0625f : 1.f; }
    // The dimension of an output's row g (half 0) or g + 8 (1), and the factor that it needs.
    static __device__ int output_dim(int output, int g, int half) {
        if constexpr (kPlain) return 16 * output + g + 8 * half;
        if constexpr (kNibbles) return 32 * (output / 2) + 4 * g + 2 * (output % 2) + half;
        return 16 * output + 2 * g + half;
    }
    static constexpr __device__ float output_factor(int half) {
        return kNibbles && half == 1 ? kUnit / 16.f : kUnit;
    }
};

// copy_async of 16 bytes that lie among others to come.
__device__ inline void copy_piece(const void* shared, const void* global, int bytes) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(bytes)
                 : "memory");
}

// Asks for `Keys` consecutive rows; those from `valid` on become zeros, if the format knows NaN and infinity:
// what was never written may be that, and its product with a weight of zero is not zero.
template <KvFormat F, int D, int Keys>
__device__ inline void request_rows(uint8_t* tile, const uint8_t* rows, int valid, int lane) {
    constexpr int kChunks = DecodeFormat<F, D>::kChunks;
    static_assert(Keys * kChunks % 32 == 0);
#pragma unroll
    for (int n = 0; n < Keys * kChunks / 32; ++n) {
        const int i = lane + 32 * n, row = i / kChunks;
        copy_piece(tile + 16 * swizzled<kChunks>(row, i % kChunks), rows + 16 * i,
                   DecodeFormat<F, D>::kAlwaysFinite || row < valid ? 16 : 0);
    }
}

// use(s, a) for each step s of 16 dimensions: keys [first, first + 16) as the A operand.
template <KvFormat F, int D, class Use>
__device__ inline void key_fragments(const uint8_t* tile, int first, int lane, Use&& use) {
    constexpr int kChunks = DecodeFormat<F, D>::kChunks;
    const int row = first + lane / 4, t = lane % 4;
    if constexpr (F == KvFormat::Plain) {
#pragma unroll
        for (int s = 0; s < D / 16; ++s) {
            unsigned a[4];
            load_matrices(a, tile + 16 * swizzled<kChunks>(first + lane % 16, 2 * s + lane / 16));
            use(s, a);
        }
    } else if constexpr (F != KvFormat::Int4) {
#pragma unroll
        for (int h = 0; h < D / 64; ++h) {
            const int chunk = t * (D / 64) + h;
            const uint4 low = *reinterpret_cast<const uint4*>(tile + 16 * swizzled<kChunks>(row, chunk)),
                        high = *reinterpret_cast<const uint4*>(tile + 16 * swizzled<kChunks>(row + 8, chunk));
            const unsigned v[4] = {low.x, low.y, low.z, low.w}, w[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned a[4] = {low_codes<F>(v[i]), low_codes<F>(w[i]), high_codes<F>(v[i]),
                                       high_codes<F>(w[i])};
                use(4 * h + i, a);
            }
        }
    } else {
        constexpr int kWords = D / 32;  // of a lane and row
        unsigned v[kWords], w[kWords];
        if constexpr (kWords == 2) {
            const uint2 low = *reinterpret_cast<const uint2*>(tile + 16 * swizzled<kChunks>(row, t / 2) +
                                                              t % 2 * 8),
                        high = *reinterpret_cast<const uint2*>(tile + 16 * swizzled<kChunks>(row + 8, t / 2) +
                                                               t % 2 * 8);
            v[0] = low.x, v[1] = low.y, w[0] = high.x, w[1] = high.y;
        } else {
#pragma unroll
            for (int h = 0; h < kWords / 4; ++h) {
                const int chunk = t * (kWords / 4) + h;
                const uint4 low = *reinterpret_cast<const uint4*>(tile + 16 * swizzled<kChunks>(row, chunk)),
                            high = *reinterpret_cast<const uint4*>(tile +
                                                                   16 * swizzled<kChunks>(row + 8, chunk));
                v[4 * h] = low.x, v[4 * h + 1] = low.y, v[4 * h + 2] = low.z, v[4 * h + 3] = low.w;
                w[4 * h] = high.x, w[4 * h + 1] = high.y, w[4 * h + 2] = high.z, w[4 * h + 3] = high.w;
            }
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const unsigned x = v[i] >> (8 * odd), y = w[i] >> (8 * odd);
                const unsigned a[4] = {x & 0x000f000fu, y & 0x000f000fu, x & 0x00f000f0u, y & 0x00f000f0u};
                use(2 * i + odd, a);
            }
        }
    }
}

// use(o, a) for each output o of 16 dimensions: transposed values of keys [first, first + 16) as the A
// operand.
template <KvFormat F, int D, class Use>
__device__ inline void value_fragments(const uint8_t* tile, int first, int lane, Use&& use) {
    constexpr int kChunks = DecodeFormat<F, D>::kChunks;
    if constexpr (F == KvFormat::Plain) {
        const int row = first + lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int o = 0; o < D / 16; ++o) {
            unsigned a[4];
            load_transposed(a, tile + 16 * swizzled<kChunks>(row, 2 * o + lane / 8 % 2));
            use(o, a);
        }
    } else {
        const int row = first + lane % 16;
#pragma unroll
        for (int c = 0; c < kChunks; c += 2) {
            unsigned r[4];  // chunk c of keys 0..7, of keys 8..15, then chunk c + 1
            load_transposed(r, tile + 16 * swizzled<kChunks>(row, c + lane / 16));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned x = r[2 * i], y = r[2 * i + 1];
                if constexpr (F != KvFormat::Int4) {
                    const unsigned a[4] = {even_codes<F>(x), odd_codes<F>(x), even_codes<F>(y),
                                           odd_codes<F>(y)};
                    use(c + i, a);
                } else {
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        const unsigned u = x >> (8 * odd), v = y >> (8 * odd);
                        const unsigned a[4] = {u & 0x000f000fu, u & 0x00f000f0u, v & 0x000f000fu,
                                               v & 0x00f000f0u};
                        use(2 * (c + i) + odd, a);
                    }
                }
            }
        }
    }
}

// The transpose of an 8 x 8 matrix whose row g, columns 2t and 2t + 1, lane 4g + t holds.
__device__ inline unsigned transposed(unsigned v) {
    unsigned r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

}  // namespace turbomill::cuda
