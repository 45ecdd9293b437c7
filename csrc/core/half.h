// Scalar conversions between fp32 and the 16-bit types, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace turbomill {

static inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float bf16_to_float(uint16_t bits) {
    return bits_to_float(uint32_t(bits) << 16);
}

static inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);  // NaN stays NaN
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float f16_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
    // Multiplying by 2^112 rebiases the exponent and normalises subnormals exactly.
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 5.192296858534828e+33f));
}

static inline uint16_t float_to_f16(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00;   // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // rounds to infinity
    if (magnitude < 0x38800000u) {                       // subnormal: let the FPU round at 2^-24
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace turbomill
