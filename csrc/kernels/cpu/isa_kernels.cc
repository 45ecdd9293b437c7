// The inner loops of kernels.h. CMake compiles this file once per instruction set, with TM_ISA naming the
// set. It must not instantiate templates or inline functions shared with other files (the linker would keep
// one copy, compiled for the wrong CPU), so it uses raw pointers and plain loops only.
#include <cmath>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/vec.h"

#define TM_CONCAT_(a, b) a##b
#define TM_CONCAT(a, b) TM_CONCAT_(a, b)
#define TM_STRING_(a) #a
#define TM_STRING(a) TM_STRING_(a)

namespace {

using turbomill::DType;
using turbomill::KvFormat;
using turbomill::cpu::kMaxRows;
using turbomill::cpu::PackedWeight;

inline vf load_as(DType dtype, const void* base, int64_t i) {
    switch (dtype) {
        case DType::F16:
            return load_f16(static_cast<const uint16_t*>(base) + i);
        case DType::BF16:
            return load_bf16(static_cast<const uint16_t*>(base) + i);
        default:
            return load(static_cast<const float*>(base) + i);
    }
}

inline float scalar_as(DType dtype, const void* base, int64_t i) {
    switch (dtype) {
        case DType::F16:
            return f16_scalar(static_cast<const uint16_t*>(base)[i]);
        case DType::BF16:
            return turbomill::bf16_to_float(static_cast<const uint16_t*>(base)[i]);
        default:
            return static_cast<const float*>(base)[i];
    }
}

void to_float(DType dtype, const void* src, float* dst, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(dst + i, load_as(dtype, src, i));
    for (; i < n; ++i) dst[i] = scalar_as(dtype, src, i);
}

void from_float(DType dtype, const float* src, void* dst, int64_t n) {
    if (dtype == DType::F32) {
        std::memcpy(dst, src, size_t(n) * 4);
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(dst);
    int64_t i = 0;
    if (dtype == DType::F16) {
        for (; i + kLanes <= n; i += kLanes) store_f16(out + i, load(src + i));
        for (; i < n; ++i) out[i] = turbomill::float_to_f16(src[i]);
    } else {
        for (; i < n; ++i) out[i] = turbomill::float_to_bf16(src[i]);
    }
}

void rms_norm(const float* x, const float* w, float* y, int h, float eps) {
    vf squares{};
    int i = 0;
    for (; i + kLanes <= h; i += kLanes) {
        const vf v = load(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < h; ++i) total += x[i] * x[i];
    const float scale = 1.f / std::sqrt(total / float(h) + eps);
    for (i = 0; i + kLanes <= h; i += kLanes) store(y + i, load(x + i) * scale * load(w + i));
    for (; i < h; ++i) y[i] = x[i] * scale * w[i];
}

void add(const float* x, float* y, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, load(y + i) + load(x + i));
    for (; i < n; ++i) y[i] += x[i];
}

void rope(float* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

// out = g * sigmoid(z(g)) * up, with z of the activation
template <class Z>
inline void sigmoid_gate(const float* gate_up, float* out, int inter, Z z) {
    for (int i = 0; i < inter; i += 8) {
        float gate[16] = {}, result[16];
        std::memcpy(gate, gate_up + 2 * i, 32);
        const vf g = load(gate);
        store(result, g / (exp(-z(g)) + 1.f));
        for (int j = 0; j < 8; ++j) out[i + j] = result[j] * gate_up[2 * i + 8 + j];
    }
}

void silu_gate(const float* gate_up, float* out, int inter) {
    sigmoid_gate(gate_up, out, inter, [](vf g) { return g; });
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u)
void gelu_gate(const float* gate_up, float* out, int inter) {
    sigmoid_gate(gate_up, out, inter, [](vf g) { return 1.5957691216057308f * (g + 0.044715f * g * g * g); });
}

// tanh(u) = 1 - 2 / (exp(2 u) + 1)
void softcap(float* x, int64_t n, float scale, float cap) {
    const float twice = 2.f * scale / cap;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const vf e = exp(load(x + i) * twice);
        store(x + i, cap - 2.f * cap / (e + 1.f));
    }
    for (; i < n; ++i) x[i] = cap * std::tanh(x[i] * scale / cap);
}

template <int Rows, DType Type>
void dense_rows(const void* w, const float* x, int64_t ldx, float* y, int64_t ldy, int k_dim, int n0,
                int n1) {
    for (int n = n0; n < n1; ++n) {
        const int64_t row = int64_t(n) * k_dim;
        vf acc[Rows] = {};
        int k = 0;
        for (; k + kLanes <= k_dim; k += kLanes) {
            const vf v = load_as(Type, w, row + k);
            for (int m = 0; m < Rows; ++m) acc[m] += v * load(x + m * ldx + k);
        }
        float tail[Rows];
        for (int m = 0; m < Rows; ++m) tail[m] = sum(acc[m]);
        for (; k < k_dim; ++k) {
            const float v = scalar_as(Type, w, row + k);
            for (int m = 0; m < Rows; ++m) tail[m] += v * x[m * ldx + k];
        }
        for (int m = 0; m < Rows; ++m) y[m * ldy + n] = tail[m];
    }
}

template <DType Type>
void dense_typed(const void* w, const float* x, int64_t ldx, float* y, int64_t ldy, int rows, int k_dim,
                 int n0, int n1) {
    switch (rows) {
        case 1:
            return dense_rows<1, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 2:
            return dense_rows<2, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 3:
            return dense_rows<3, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 4:
            return dense_rows<4, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 5:
            return dense_rows<5, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 6:
            return dense_rows<6, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 7:
            return dense_rows<7, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 8:
            return dense_rows<8, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
    }
}

void linear_dense(DType dtype, const void* w, const float* x, int64_t ldx, float* y, int64_t ldy, int rows,
                  int k_dim, int n0, int n1) {
    switch (dtype) {
        case DType::F16:
            return dense_typed<DType::F16>(w, x, ldx, y, ldy, rows, k_dim, n0, n1);
        case DType::BF16:
            return dense_typed<DType::BF16>(w, x, ldx, y, ldy, rows, k_dim, n0, n1);
        default:
            return dense_typed<DType::F32>(w, x, ldx, y, ldy, rows, k_dim, n0, n1);
    }
}

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

// Of |v| <= kFp8Top, to the nearest, ties to even. Mantissa: its bits, 3 or 2.
template <int Mantissa>
inline uint8_t fp8_code(float v) {
    constexpr int kDropped = 23 - Mantissa, kBias = Mantissa == 3 ? 7 : 15;
    const uint32_t bits = turbomill::float_to_bits(v), sign = bits >> 24 & 0x80;
    const float size = turbomill::bits_to_float(bits & 0x7fffffffu);
    const float step = turbomill::bits_to_float(uint32_t(127 + 1 - kBias - Mantissa) << 23);  // of subnormals
    if (size < step * float(1 << Mantissa)) return uint8_t(sign | uint32_t(std::nearbyint(size / step)));
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t rounded = magnitude + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1);
    return uint8_t(sign | ((rounded >> kDropped) - (uint32_t(127 - kBias) << Mantissa)));
}

template <int Mantissa>
inline float fp8_value(uint8_t code) {
    // Its fields, in the places of float16's, make a number that is too small by a power of two.
    if (Mantissa == 2) return f16_scalar(uint16_t(code << 8));
    return 256.f * f16_scalar(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7));
}

template <int Mantissa>
void fp8_quantize(const float* x, int d, uint8_t* codes, uint16_t* params) {
    float most = 0.f;
    for (int i = 0; i < d; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    params[0] = turbomill::float_to_f16(most / turbomill::kFp8Top);
    params[1] = 0;
    const float scale = turbomill::f16_to_float(params[0]), inverse = scale > 0.f ? 1.f / scale : 0.f;
    for (int i = 0; i < d; ++i) {
        const float v = x[i] * inverse, top = turbomill::kFp8Top;
        codes[i] = fp8_code<Mantissa>(v > top ? top : v < -top ? -top : v);
    }
}

void kv_quantize(KvFormat format, const float* x, int d, uint8_t* codes, uint16_t* params) {
    if (format == KvFormat::E4M3) return fp8_quantize<3>(x, d, codes, params);
    if (format == KvFormat::E5M2) return fp8_quantize<2>(x, d, codes, params);
    const int bits = format == KvFormat::Int4 ? 4 : 8;
    float low = x[0], high = x[0];
    for (int i = 1; i < d; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const int top = (1 << bits) - 1;
    params[0] = turbomill::float_to_f16((high - low) / float(top));
    params[1] = turbomill::float_to_f16(low);
    // Codes are computed against the rounded parameters, which are what the reader will have.
    const float scale = turbomill::f16_to_float(params[0]), zero = turbomill::f16_to_float(params[1]);
    const float inverse = scale > 0.f ? 1.f / scale : 0.f;
    for (int i = 0; i < d; ++i) {
        const float level = (x[i] - zero) * inverse;
        const int code = level <= 0.f ? 0 : level >= float(top) ? top : int(level + 0.5f);
        if (bits == 8) {
            codes[i] = uint8_t(code);
        } else if (i % 2 == 0) {
            codes[i / 2] = uint8_t(code);
        } else {
            codes[i / 2] |= uint8_t(code << 4);
        }
    }
}

// Sixteen codes as floats.
inline vf fp8_values(KvFormat format, const uint8_t* codes) {
    uint16_t halves[16];
    if (format == KvFormat::E5M2) {
        for (int i = 0; i < 16; ++i) halves[i] = uint16_t(codes[i] << 8);
        return load_f16(halves);
    }
    for (int i = 0; i < 16; ++i) halves[i] = uint16_t((codes[i] & 0x80) << 8 | (codes[i] & 0x7f) << 7);
    return load_f16(halves) * 256.f;
}

// Nibbles of eight bytes, lowest first.
inline vf nibble_values(const uint8_t* codes) {
    uint8_t nibbles[16];
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)codes), low = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
    _mm_storeu_si128((__m128i*)nibbles, _mm_unpacklo_epi8(even, odd));
#else
    for (int i = 0; i < 8; ++i) {
        nibbles[2 * i] = codes[i] & 15;
        nibbles[2 * i + 1] = codes[i] >> 4;
    }
#endif
    return from_bytes(nibbles);
}

void kv_dequantize(KvFormat format, const uint8_t* codes, const uint16_t* params, int d, float* dst) {
    const float scale = f16_scalar(params[0]), zero = f16_scalar(params[1]);
    int i = 0;
    switch (format) {
        case KvFormat::Int8:
            for (; i + kLanes <= d; i += kLanes) store(dst + i, from_bytes(codes + i) * scale + zero);
            for (; i < d; ++i) dst[i] = float(codes[i]) * scale + zero;
            return;
        case KvFormat::Int4:
            for (; i + kLanes <= d; i += kLanes) store(dst + i, nibble_values(codes + i / 2) * scale + zero);
            for (; i < d; ++i) dst[i] = float(i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15) * scale + zero;
            return;
        case KvFormat::E4M3:
        case KvFormat::E5M2:
            for (; i + kLanes <= d; i += kLanes) store(dst + i, fp8_values(format, codes + i) * scale);
            for (; i < d; ++i)
                dst[i] = scale * (format == KvFormat::E4M3 ? fp8_value<3>(codes[i]) : fp8_value<2>(codes[i]));
            return;
        case KvFormat::Plain:
            return;
    }
}

void hadamard(float* x, int d, int block) {
    for (int width = 1; width < block; width *= 2) {
        for (int begin = 0; begin < d; begin += 2 * width) {
            float *a = x + begin, *b = a + width;
            int i = 0;
            for (; i + kLanes <= width; i += kLanes) {
                const vf u = load(a + i), v = load(b + i);
                store(a + i, u + v);
                store(b + i, u - v);
            }
            for (; i < width; ++i) {
                const float u = a[i], v = b[i];
                a[i] = u + v;
                b[i] = u - v;
            }
        }
    }
    const float unit = 1.f / std::sqrt(float(block));
    for (int i = 0; i < d; ++i) x[i] *= unit;
}

void softmax_step(float* scores, int count, float scale, float* max_so_far, float* sum_so_far, float* out,
                  int d) {
    float top = *max_so_far;
    for (int i = 0; i < count; ++i) {
        scores[i] *= scale;
        top = scores[i] > top ? scores[i] : top;
    }
    const float shrink = std::exp(*max_so_far - top);  // 0 for the first block: max starts at -inf
    if (shrink != 1.f)
        for (int i = 0; i < d; ++i) out[i] *= shrink;
    vf total{};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const vf e = exp(load(scores + i) - top);
        store(scores + i, e);
        total += e;
    }
    float rest = sum(total);
    for (; i < count; ++i) {
        scores[i] = std::exp(scores[i] - top);
        rest += scores[i];
    }
    *sum_so_far = *sum_so_far * shrink + rest;
    *max_so_far = top;
}

void weighted_sum(const float* p, const float* v, int count, int d, float* out) {
    int i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        vf acc = load(out + i);
        for (int t = 0; t < count; ++t) acc += p[t] * load(v + int64_t(t) * d + i);
        store(out + i, acc);
    }
    for (; i < d; ++i)
        for (int t = 0; t < count; ++t) out[i] += p[t] * v[int64_t(t) * d + i];
}

}  // namespace

namespace turbomill::cpu {

extern const Kernels TM_CONCAT(kernels_, TM_ISA) = {
    TM_STRING(TM_ISA), to_float, from_float,   rms_norm,       add,           rope,           silu_gate,
    gelu_gate,         softcap,  linear_dense, permute_packed, linear_packed, dequant_packed, kv_quantize,
    kv_dequantize,     hadamard, softmax_step, weighted_sum,
};

}  // namespace turbomill::cpu
