// Linears of packed weights with activations in fp32.
// Included only by isa_kernels.cc; everything is internal to that translation unit.
#pragma once

#include <cmath>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/vec.h"

namespace {

using turbomill::DType;
using turbomill::cpu::PackedWeight;

// Byte p = 16 t + 4 s + j of a row's 64 bytes holds column 16 s + {2t, 2t+8, 2t+1, 2t+9}[j].
inline int packed_column(int p) {
    const int t = p / 16, s = p / 4 % 4, j = p % 4;
    return 16 * s + 2 * t + (j & 1) * 8 + (j >> 1);
}

// A whole tile: packed_column by sixteen numbers.
void permute_tile(const float* x, float* out) {
    for (int s = 0; s < 4; ++s) {
        float step[16];
        const vf v = load(x + 16 * s);
        store(step, __builtin_shufflevector(v, v, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
        for (int t = 0; t < 4; ++t) std::memcpy(out + 16 * t + 4 * s, step + 4 * t, 16);
    }
}

void permute_packed(const float* x, int64_t ldx, float* dst, int rows, int k, int k_tiles) {
    for (int m = 0; m < rows; ++m) {
        for (int tile = 0; tile < k_tiles; ++tile) {
            float* out = dst + (int64_t(m) * k_tiles + tile) * 64;
            if (tile * 64 + 64 <= k) {
                permute_tile(x + m * ldx + tile * 64, out);
                continue;
            }
            for (int p = 0; p < 64; ++p) {
                const int column = tile * 64 + packed_column(p);
                out[p] = column < k ? x[m * ldx + column] : 0.f;
            }
        }
    }
}

struct SubTile {
    const uint8_t* codes;  // this sub-tile of the first K tile
    int64_t next;          // bytes from there to the same of the next tile
    const void* scales;    // [groups, 64] of the tile of 64 rows
    const void* zeros;     // or minima
    int first;             // position of this sub-tile's 16 rows in the 64
};

inline SubTile sub_tile(const PackedWeight& w, int sub) {
    SubTile s;
    const int64_t tile = sub / 4;
    s.next = 512 * w.bits;
    s.codes = w.codes + tile * w.k_tiles * s.next + (sub % 4) * (s.next / 4);
    const int64_t params = tile * w.groups * 64 * 2;  // bytes: 16-bit types
    s.scales = static_cast<const uint8_t*>(w.scales) + params;
    const void* beside = w.mins ? w.mins : w.zeros;
    s.zeros = beside ? static_cast<const uint8_t*>(beside) + params : nullptr;
    s.first = sub % 4 * 16;
    return s;
}

// Scale and zero, or minimum, of one row in one 64-column tile, per lane: with group 32 the lanes of steps 0,
// 1 and of steps 2, 3 (each four lanes hold one step's four columns) belong to different groups.
struct GroupParams {
    vf scale, zero;
};

template <DType Type>
inline float param(const void* base, int64_t i) {
    const uint16_t bits = static_cast<const uint16_t*>(base)[i];
    return Type == DType::F16 ? f16_scalar(bits) : turbomill::bf16_to_float(bits);
}

inline vf halves(float first, float second) {
    return vf{first,  first,  first,  first,  first,  first,  first,  first,
              second, second, second, second, second, second, second, second};
}

// `position` is the row's place among the sub-tile's 16, in pair order.
template <DType Type>
inline GroupParams group_params(const PackedWeight& w, const SubTile& s, int tile, int position) {
    const float middle = w.bits == 4 ? 8.f : 128.f;
    if (w.group == 32) {
        const int64_t i = int64_t(2 * tile) * 64 + s.first + position;
        return {halves(param<Type>(s.scales, i), param<Type>(s.scales, i + 64)),
                s.zeros ? halves(param<Type>(s.zeros, i), param<Type>(s.zeros, i + 64)) : splat(middle)};
    }
    const int64_t i = int64_t(tile * 64 / w.group) * 64 + s.first + position;
    return {splat(param<Type>(s.scales, i)), splat(s.zeros ? param<Type>(s.zeros, i) : middle)};
}

// Sixteen codes of rows g and g + 8, as floats: step t of a sub-tile. Of 4 bits, a byte's low nibble is row
// g's; of 8 bits, row g's 64 bytes come before row g + 8's.
template <int Bits>
inline void unpack(const uint8_t* sub_tile, int g, int t, vf* low, vf* high) {
    if constexpr (Bits == 8) {
        *low = from_bytes(sub_tile + g * 128 + 16 * t);
        *high = from_bytes(sub_tile + g * 128 + 64 + 16 * t);
        return;
    }
    const uint8_t* bytes = sub_tile + g * 64 + 16 * t;
#if defined(__AVX512F__)
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
    *low = (vf)_mm512_cvtepi32_ps(_mm512_and_epi32(words, _mm512_set1_epi32(15)));
    *high = (vf)_mm512_cvtepi32_ps(_mm512_srli_epi32(words, 4));
#else
    uint8_t nibbles[2][16];
    for (int i = 0; i < 16; ++i) nibbles[0][i] = bytes[i] & 15;
    for (int i = 0; i < 16; ++i) nibbles[1][i] = bytes[i] >> 4;
    *low = from_bytes(nibbles[0]);
    *high = from_bytes(nibbles[1]);
#endif
}

// With minima, a row is sum(code * x) * scale + min * sum(x) over each group.
template <int Rows, DType Type, bool Mins, int Bits>
void packed_rows(const PackedWeight& w, int sub, const float* permuted, float* y, int64_t ldy, int n_count) {
    const SubTile s = sub_tile(w, sub);
    const int64_t k_padded = int64_t(w.k_tiles) * 64;
    for (int g = 0; g < 8; ++g) {
        vf low_sum[Rows] = {}, high_sum[Rows] = {};
        for (int tile = 0; tile < w.k_tiles; ++tile) {
            const uint8_t* codes = s.codes + tile * s.next;
            const GroupParams a = group_params<Type>(w, s, tile, 2 * g);
            const GroupParams b = group_params<Type>(w, s, tile, 2 * g + 1);
            vf low_tile[Rows] = {}, high_tile[Rows] = {}, x_tile[Rows] = {};
            for (int t = 0; t < 4; ++t) {
                vf u, v;
                unpack<Bits>(codes, g, t, &u, &v);
                if constexpr (!Mins) {
                    u -= a.zero;
                    v -= b.zero;
                }
                for (int m = 0; m < Rows; ++m) {
                    const vf x = load(permuted + m * k_padded + tile * 64 + 16 * t);
                    low_tile[m] += u * x;
                    high_tile[m] += v * x;
                    if constexpr (Mins) x_tile[m] += x;
                }
            }
            for (int m = 0; m < Rows; ++m) {
                low_sum[m] += low_tile[m] * a.scale;
                high_sum[m] += high_tile[m] * b.scale;
                if constexpr (Mins) {
                    low_sum[m] += x_tile[m] * a.zero;
                    high_sum[m] += x_tile[m] * b.zero;
                }
            }
        }
        for (int m = 0; m < Rows; ++m) {
            if (g < n_count) y[m * ldy + g] = sum(low_sum[m]);
            if (g + 8 < n_count) y[m * ldy + g + 8] = sum(high_sum[m]);
        }
    }
}

template <DType Type, bool Mins, int Bits>
void packed_typed(const PackedWeight& w, int sub, const float* permuted, float* y, int64_t ldy, int rows,
                  int n_count) {
    switch (rows) {
        case 1:
            return packed_rows<1, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 2:
            return packed_rows<2, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 3:
            return packed_rows<3, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 4:
            return packed_rows<4, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 5:
            return packed_rows<5, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 6:
            return packed_rows<6, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 7:
            return packed_rows<7, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
        case 8:
            return packed_rows<8, Type, Mins, Bits>(w, sub, permuted, y, ldy, n_count);
    }
}

template <int Bits>
void packed_bits(const PackedWeight& w, int sub, const float* permuted, float* y, int64_t ldy, int rows,
                 int n_count) {
    const auto run =
        w.dtype == DType::F16
            ? (w.mins ? packed_typed<DType::F16, true, Bits> : packed_typed<DType::F16, false, Bits>)
            : (w.mins ? packed_typed<DType::BF16, true, Bits> : packed_typed<DType::BF16, false, Bits>);
    run(w, sub, permuted, y, ldy, rows, n_count);
}

void linear_packed(const PackedWeight& w, int sub, const float* permuted, float* y, int64_t ldy, int rows,
                   int n_count) {
    const auto run = w.bits == 4 ? packed_bits<4> : packed_bits<8>;
    run(w, sub, permuted, y, ldy, rows, n_count);
}

template <DType Type, int Bits>
void dequant_typed(const PackedWeight& w, int sub, float* dst) {
    const SubTile s = sub_tile(w, sub);
    const int64_t k_padded = int64_t(w.k_tiles) * 64;
    for (int tile = 0; tile < w.k_tiles; ++tile) {
        for (int g = 0; g < 8; ++g) {
            const uint8_t* codes = s.codes + tile * s.next;
            const GroupParams a = group_params<Type>(w, s, tile, 2 * g);
            const GroupParams b = group_params<Type>(w, s, tile, 2 * g + 1);
            float* low = dst + g * k_padded + tile * 64;
            float* high = low + 8 * k_padded;
            for (int t = 0; t < 4; ++t) {
                vf u, v;
                unpack<Bits>(codes, g, t, &u, &v);
                store(low + 16 * t, w.mins ? u * a.scale + a.zero : (u - a.zero) * a.scale);
                store(high + 16 * t, w.mins ? v * b.scale + b.zero : (v - b.zero) * b.scale);
            }
        }
    }
}

void dequant_packed(const PackedWeight& w, int sub, float* dst) {
    const auto run = w.dtype == DType::F16
                         ? (w.bits == 4 ? dequant_typed<DType::F16, 4> : dequant_typed<DType::F16, 8>)
                         : (w.bits == 4 ? dequant_typed<DType::BF16, 4> : dequant_typed<DType::BF16, 8>);
    run(w, sub, dst);
}

}  // namespace
