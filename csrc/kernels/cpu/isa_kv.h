// Rows of the KV cache: quantized, dequantized, rotated.
// Included only by isa_kernels.cc; everything is internal to that translation unit.
#pragma once

#include <cmath>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/vec.h"

namespace {

using turbomill::KvFormat;

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

}  // namespace
