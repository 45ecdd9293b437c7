// int8.h for AVX-512 VNNI. Compiled for that instruction set alone: see isa_kernels.cc for what such a file
// must not use.
#include <immintrin.h>

#include <cstring>

#include "core/half.h"
#include "kernels/cpu/int8.h"

namespace {

using turbomill::DType;
using turbomill::cpu::Int8Rows;
using turbomill::cpu::PackedWeight;

constexpr int kTilesAtOnce =
    16;  // K tiles whose codes are spread out at a time: they stay in the first cache
constexpr int kRowsAtOnce = turbomill::cpu::kByteLanes;  // whose sums are in registers
constexpr int64_t kTileBytes = 16 * 64;                  // of a sub-tile's codes, a byte each
constexpr int64_t kParamBytes = 2 * 128;                 // of a tile's two halves: scales, and what is added

// What follows the codes in the scratch memory.
constexpr int64_t kParamsAt = kTilesAtOnce * kTileBytes;
constexpr int64_t kSumsAt = kParamsAt + kTilesAtOnce * kParamBytes;

inline __m512 half_to_float(DType dtype, __m256i bits) {
    if (dtype == DType::F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Values of 16 rows lie in pair order: 0, 8, 1, 9, ...; lanes here are rows.
inline __m512 row_values(DType dtype, const void* base, int64_t at) {
    const __m512i rows = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const auto* from = reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(base) + at);
    return _mm512_permutexvar_ps(rows, half_to_float(dtype, _mm256_loadu_si256(from)));
}

// Scale and offset of 16 rows in one group: w = code * scale + offset.
struct Params {
    __m512 scale, offset;
};

inline Params params(const PackedWeight& w, int sub, int group) {
    const int64_t at = (int64_t(sub / 4) * w.groups + group) * 64 + sub % 4 * 16;
    const __m512 scale = row_values(w.dtype, w.scales, at);
    if (w.mins) return {scale, row_values(w.dtype, w.mins, at)};
    const __m512 zero =
        w.zeros ? row_values(w.dtype, w.zeros, at) : _mm512_set1_ps(w.bits == 4 ? 8.f : 128.f);
    return {scale, _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(zero, scale))};
}

// The groups of a tile's two halves: one and the same unless groups are of 32.
inline int group_of(const PackedWeight& w, int tile, int half) {
    return w.group == 32 ? 2 * tile + half : tile * 64 / w.group;
}

// rows[g]: 64 bytes of row g, sixteen words of four. columns[4 c + p], p < 2: word c, and word c + 4 of the
// 128-bit lanes 2 p and 2 p + 1, of rows 0..7: its low half is word 4 (2 p) + c, its high half 4 (2 p + 1) +
// c.
inline void transpose8(const __m512i* rows, __m512i* columns) {
    __m512i low[4], high[4], quads[2][4];
    for (int i = 0; i < 4; ++i) {
        low[i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        high[i] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        quads[i][0] = _mm512_unpacklo_epi64(low[2 * i], low[2 * i + 1]);
        quads[i][1] = _mm512_unpackhi_epi64(low[2 * i], low[2 * i + 1]);
        quads[i][2] = _mm512_unpacklo_epi64(high[2 * i], high[2 * i + 1]);
        quads[i][3] = _mm512_unpackhi_epi64(high[2 * i], high[2 * i + 1]);
    }
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int c = 0; c < 4; ++c) {
        columns[2 * c] = _mm512_permutex2var_epi64(quads[0][c], first, quads[1][c]);
        columns[2 * c + 1] = _mm512_permutex2var_epi64(quads[0][c], second, quads[1][c]);
    }
}

// A sub-tile's 16 x 64 codes as sixteen vectors, one for each word of four columns, a lane to a row: vector
// 4 s + t has the columns of step s that quarter t owns, which are word 4 t + s of a row.
inline void spread_codes(int bits, const uint8_t* sub_tile, uint8_t* out) {
    __m512i rows[8], low[8], high[8];
    if (bits == 4) {
        const __m512i nibble = _mm512_set1_epi8(15);
        for (int g = 0; g < 8; ++g) rows[g] = _mm512_loadu_si512(sub_tile + 64 * g);
        transpose8(rows, low);
        for (int i = 0; i < 8; ++i) {
            high[i] = _mm512_and_si512(_mm512_srli_epi16(low[i], 4), nibble);
            low[i] = _mm512_and_si512(low[i], nibble);
        }
    } else {
        for (int g = 0; g < 8; ++g) rows[g] = _mm512_loadu_si512(sub_tile + 128 * g);
        transpose8(rows, low);
        for (int g = 0; g < 8; ++g) rows[g] = _mm512_loadu_si512(sub_tile + 128 * g + 64);
        transpose8(rows, high);
    }
    for (int s = 0; s < 4; ++s) {
        for (int p = 0; p < 2; ++p) {
            const __m512i a = low[2 * s + p], b = high[2 * s + p];
            uint8_t* to = out + (4 * s + 2 * p) * 64;
            _mm512_store_si512(to, _mm512_shuffle_i64x2(a, b, 0x44));
            _mm512_store_si512(to + 64, _mm512_shuffle_i64x2(a, b, 0xee));
        }
    }
}

inline __m512i broadcast_word(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return _mm512_set1_epi32(word);
}

// Rows [m0, m0 + Rows) of x, of one block, against `tiles` tiles of spread codes; sums [rows, 16] go on from
// what they are.
template <int Rows, int Halves, bool Two>
void products(const uint8_t* spread, const float* param, const Int8Rows& x, int m0, int first, int tiles,
              float* sums) {
    constexpr int kLanes = kRowsAtOnce;
    __m512 total[Rows];
    for (int m = 0; m < Rows; ++m) total[m] = _mm512_load_ps(sums + (m0 + m) * 16);
    const int64_t at = (int64_t(m0 / kLanes) * x.k_tiles + first) * kLanes;
    const int8_t* high = x.high + at * 64;
    const int8_t* rest = Two ? x.low + at * 64 : nullptr;
    const float* scales = x.scales + at;
    const float* offsets = x.sums + at * 2;
    for (int tile = 0; tile < tiles; ++tile) {
        for (int half = 0; half < Halves; ++half) {
            __m512i dot[Rows], low[Rows];
            for (int m = 0; m < Rows; ++m) dot[m] = low[m] = _mm512_setzero_si512();
            for (int s = half * 2; s < (Halves == 2 ? half * 2 + 2 : 4); ++s) {
                for (int t = 0; t < 4; ++t) {
                    const __m512i w = _mm512_load_si512(spread + (4 * s + t) * 64);
                    for (int m = 0; m < Rows; ++m) {
                        const int word = ((4 * t + s) * kLanes + m) * 4;
                        dot[m] = _mm512_dpbusd_epi32(dot[m], w, broadcast_word(high + word));
                        if constexpr (Two)
                            low[m] = _mm512_dpbusd_epi32(low[m], w, broadcast_word(rest + word));
                    }
                }
            }
            const __m512 scale = _mm512_load_ps(param + 32 * half);
            const __m512 offset = _mm512_load_ps(param + 32 * half + 16);
            for (int m = 0; m < Rows; ++m) {
                if constexpr (Two) dot[m] = _mm512_add_epi32(_mm512_slli_epi32(dot[m], 8), low[m]);
                const float* sum = offsets + m;
                const __m512 added = _mm512_set1_ps(Halves == 2 ? sum[half * kLanes] : sum[0] + sum[kLanes]);
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(scales[m]));
                total[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[m]), both, total[m]);
                total[m] = _mm512_fmadd_ps(offset, added, total[m]);
            }
        }
        spread += kTileBytes;
        param += kParamBytes / 4;
        high += 64 * kLanes;
        if constexpr (Two) rest += 64 * kLanes;
        scales += kLanes;
        offsets += 2 * kLanes;
    }
    for (int m = 0; m < Rows; ++m) _mm512_store_ps(sums + (m0 + m) * 16, total[m]);
}

template <int Halves, bool Two>
void products_of(int rows, const uint8_t* spread, const float* param, const Int8Rows& x, int m0, int first,
                 int tiles, float* sums) {
    switch (rows) {
        case 1:
            return products<1, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        case 2:
            return products<2, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        case 3:
            return products<3, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        case 4:
            return products<4, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        case 5:
            return products<5, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        case 6:
            return products<6, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        case 7:
            return products<7, Halves, Two>(spread, param, x, m0, first, tiles, sums);
        default:
            return products<kRowsAtOnce, Halves, Two>(spread, param, x, m0, first, tiles, sums);
    }
}

// The sums of each of sixteen vectors, in their order.
inline __m512 sum_each(const __m512* v) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                                 _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44),
                                       _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
    const __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44),
                                        _mm512_shuffle_f32x4(fours[2], fours[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                         _mm512_shuffle_f32x4(first, second, 0xdd));
}

// One row of x: codes are multiplied as they lie, a weight's row to a vector, and only summed at the end.
template <int Bits, bool Split, bool Two>
void one_row(const PackedWeight& w, int sub, const Int8Rows& x, float* y, int n_count) {
    constexpr int64_t kStep = 512 * Bits;
    const uint8_t* codes = w.codes + int64_t(sub / 4) * w.k_tiles * kStep + sub % 4 * (kStep / 4);
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 total[16], offsets = _mm512_setzero_ps();
    for (int r = 0; r < 16; ++r) total[r] = _mm512_setzero_ps();
    alignas(64) float scales[2][16];
    for (int tile = 0; tile < w.k_tiles; ++tile, codes += kStep) {
        const __m512i high = _mm512_loadu_si512(x.high + int64_t(tile) * 64);
        const __m512i low = Two ? _mm512_loadu_si512(x.low + int64_t(tile) * 64) : high;
        const __m512 own = _mm512_set1_ps(x.scales[tile]);
        for (int half = 0; half < (Split ? 2 : 1); ++half) {
            const Params p = params(w, sub, group_of(w, tile, half));
            _mm512_store_ps(scales[half], _mm512_mul_ps(p.scale, own));
            const float sum = Split ? x.sums[2 * tile + half] : x.sums[2 * tile] + x.sums[2 * tile + 1];
            offsets = _mm512_fmadd_ps(p.offset, _mm512_set1_ps(sum), offsets);
        }
        const auto add = [&](int r, __m512i row) {
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), row, high);
            if constexpr (Two) dot = _mm512_dpbusd_epi32(_mm512_slli_epi32(dot, 8), row, low);
            __m512 scale = _mm512_set1_ps(scales[0][r]);
            // Words 4 t + s with s > 1 belong to the second half.
            if constexpr (Split) scale = _mm512_mask_mov_ps(scale, 0xcccc, _mm512_set1_ps(scales[1][r]));
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, total[r]);
        };
        for (int g = 0; g < 8; ++g) {
            if constexpr (Bits == 4) {
                const __m512i pair = _mm512_loadu_si512(codes + 64 * g);
                add(g, _mm512_and_si512(pair, nibble));
                add(g + 8, _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble));
            } else {
                add(g, _mm512_loadu_si512(codes + 128 * g));
                add(g + 8, _mm512_loadu_si512(codes + 128 * g + 64));
            }
        }
    }
    _mm512_mask_storeu_ps(y, __mmask16((1u << n_count) - 1), _mm512_add_ps(sum_each(total), offsets));
}

template <int Bits, bool Split>
void one_row_of(const PackedWeight& w, int sub, const Int8Rows& x, float* y, int n_count) {
    x.low ? one_row<Bits, Split, true>(w, sub, x, y, n_count)
          : one_row<Bits, Split, false>(w, sub, x, y, n_count);
}

void linear(const PackedWeight& w, int sub, const Int8Rows& x, float* y, int64_t ldy, int n_count,
            uint8_t* scratch) {
    const bool split = w.group == 32;
    if (x.lanes == 1) {
        const auto run = w.bits == 4 ? (split ? one_row_of<4, true> : one_row_of<4, false>)
                                     : (split ? one_row_of<8, true> : one_row_of<8, false>);
        return run(w, sub, x, y, n_count);
    }
    const int64_t tile_bytes = 512 * w.bits;
    const uint8_t* codes = w.codes + int64_t(sub / 4) * w.k_tiles * tile_bytes + sub % 4 * (tile_bytes / 4);
    auto* param = reinterpret_cast<float*>(scratch + kParamsAt);
    auto* sums = reinterpret_cast<float*>(scratch + kSumsAt);
    std::memset(sums, 0, size_t(x.rows) * 64);
    const auto multiply = split ? (x.low ? products_of<2, true> : products_of<2, false>)
                                : (x.low ? products_of<1, true> : products_of<1, false>);
    for (int first = 0; first < w.k_tiles; first += kTilesAtOnce) {
        const int tiles = w.k_tiles - first < kTilesAtOnce ? w.k_tiles - first : kTilesAtOnce;
        for (int tile = 0; tile < tiles; ++tile) {
            spread_codes(w.bits, codes + (first + tile) * tile_bytes, scratch + tile * kTileBytes);
            for (int half = 0; half < (split ? 2 : 1); ++half) {
                const Params p = params(w, sub, group_of(w, first + tile, half));
                _mm512_store_ps(param + tile * (kParamBytes / 4) + 32 * half, p.scale);
                _mm512_store_ps(param + tile * (kParamBytes / 4) + 32 * half + 16, p.offset);
            }
        }
        for (int m = 0; m < x.rows; m += kRowsAtOnce) {
            const int rows = x.rows - m < kRowsAtOnce ? x.rows - m : kRowsAtOnce;
            multiply(rows, scratch, param, x, m, first, tiles, sums);
        }
    }
    const __mmask16 kept = __mmask16((1u << n_count) - 1);
    for (int m = 0; m < x.rows; ++m)
        _mm512_mask_storeu_ps(y + int64_t(m) * ldy, kept, _mm512_load_ps(sums + m * 16));
}

int64_t scratch_bytes(int rows) {
    return kSumsAt + int64_t(rows) * 64;
}

// Sums of the two halves of a tile's bytes. Word 4 t + s belongs to step s, of which each half has two.
inline void half_sums(const int8_t* bytes, int* first, int* second) {
    const __m512i words =
        _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(bytes));
    *first = _mm512_mask_reduce_add_epi32(0x3333, words);
    *second = _mm512_mask_reduce_add_epi32(0xcccc, words);
}

// A tile's 64 bytes to a row's words in its block.
inline void place(const int8_t* bytes, int lanes, int8_t* out) {
    if (lanes == 1) {
        _mm512_storeu_si512(out, _mm512_load_si512(bytes));
        return;
    }
    for (int word = 0; word < 16; ++word) std::memcpy(out + int64_t(word) * lanes * 4, bytes + 4 * word, 4);
}

void quantize(const float* permuted, int k_tiles, int lanes, int8_t* high, int8_t* low, float* scales,
              float* sums) {
    const float top = low ? 127.f * 256.f : 127.f;
    for (int tile = 0; tile < k_tiles; ++tile, permuted += 64) {
        __m512 v[4], most = _mm512_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm512_loadu_ps(permuted + 16 * i);
            most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
        }
        const float largest = _mm512_reduce_max_ps(most);
        const float scale = largest / top, inverse = largest > 0.f ? top / largest : 0.f;
        alignas(64) int8_t above[64], below[64];
        for (int i = 0; i < 4; ++i) {
            const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], _mm512_set1_ps(inverse)));
            __m512i upper = q;
            if (low) {
                upper = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
                const __m512i rest = _mm512_sub_epi32(q, _mm512_slli_epi32(upper, 8));
                _mm_store_si128(reinterpret_cast<__m128i*>(below + 16 * i), _mm512_cvtepi32_epi8(rest));
            }
            _mm_store_si128(reinterpret_cast<__m128i*>(above + 16 * i), _mm512_cvtsepi32_epi8(upper));
        }
        int first, second;
        half_sums(above, &first, &second);
        place(above, lanes, high + int64_t(tile) * 64 * lanes);
        if (low) {
            int first_low, second_low;
            half_sums(below, &first_low, &second_low);
            first = 256 * first + first_low;
            second = 256 * second + second_low;
            place(below, lanes, low + int64_t(tile) * 64 * lanes);
        }
        scales[tile * lanes] = scale;
        sums[2 * tile * lanes] = scale * float(first);
        sums[(2 * tile + 1) * lanes] = scale * float(second);
    }
}

}  // namespace

namespace turbomill::cpu {

extern const Int8Kernels int8_vnni = {quantize, linear, scratch_bytes};

}  // namespace turbomill::cpu
