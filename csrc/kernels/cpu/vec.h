// Sixteen floats at a time, on GCC/Clang vector extensions: one source for every instruction set.
// Included only by isa_kernels.cc; everything is internal to that translation unit.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/half.h"

namespace {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

constexpr int kLanes = 16;

// The same vector at any address: compilers turn a 64-byte memcpy into four 16-byte moves through the stack.
typedef float vf_unaligned __attribute__((vector_size(64), aligned(4), may_alias));

inline vf load(const float* p) {
    return *reinterpret_cast<const vf_unaligned*>(p);
}
inline void store(float* p, vf v) {
    *reinterpret_cast<vf_unaligned*>(p) = v;
}
inline vf splat(float x) {
    return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

inline float sum(vf v) {
    // A fixed tree, so that every instruction set adds in the same order.
    float a[16];
    store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) a[i] += a[i + width];
    return a[0];
}

inline vf max(vf a, vf b) {
    return a > b ? a : b;
}

inline float max_lane(vf v) {
    float a[16];
    store(a, v);
    float m = a[0];
    for (int i = 1; i < 16; ++i) m = a[i] > m ? a[i] : m;
    return m;
}

inline vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    union {
        vf v;
        __m256 half[2];
    } u;
    u.half[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    u.half[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
    return u.v;
#else
    vf v;
    for (int i = 0; i < 16; ++i) v[i] = turbomill::f16_to_float(p[i]);
    return v;
#endif
}

inline void store_f16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    union {
        vf v;
        __m256 half[2];
    } u;
    u.v = v;
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(u.half[0], _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(u.half[1], _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 16; ++i) p[i] = turbomill::float_to_f16(v[i]);
#endif
}

inline float f16_scalar(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    return turbomill::f16_to_float(half);
#endif
}

inline vf load_bf16(const uint16_t* p) {
    typedef uint16_t vh __attribute__((vector_size(32)));
    vh h;
    std::memcpy(&h, p, 32);
    return (vf)(__builtin_convertvector(h, vi) << 16);
}

// Sixteen bytes to floats.
inline vf from_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    union {
        vf v;
        __m256 half[2];
    } u;
    u.half[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
    u.half[1] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))));
    return u.v;
#else
    vf v;
    for (int i = 0; i < 16; ++i) v[i] = float(p[i]);
    return v;
#endif
}

// exp(x) for x <= 0 and a little above, to about one unit in the last place (Cephes' polynomial).
inline vf exp(vf x) {
    x = max(x, splat(-87.f));
    x = x < 88.f ? x : splat(88.f);
    vf scaled = x * 1.44269504088896341f;
    // Round to nearest by adding and subtracting 1.5 * 2^23.
    const vf magic = splat(12582912.f);
    vf n = (scaled + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf e = p * r * r + r + 1.f;
    vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
    return e * (vf)bits;
}

}  // namespace
