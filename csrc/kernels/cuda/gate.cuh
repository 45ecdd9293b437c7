// The gate of a feed-forward layer.
#pragma once

#include <type_traits>

namespace turbomill::cuda {

// T: the type that the result is rounded to. For 16 bits, the processor's own exponential and reciprocal,
// some 2^-20 off, are near enough, and take a third of the instructions.
template <class T>
__device__ inline float silu_gated(float gate, float up) {
    if constexpr (std::is_same_v<T, float>) {
        return up * (gate / (1.f + expf(-gate)));
    } else {
        return up * __fdividef(gate, 1.f + __expf(-gate));
    }
}

// Gelu in its tanh form, as a sigmoid: gate / (1 + exp(-2 u)), u = sqrt(2 / pi) (gate + 0.044715 gate^3).
template <class T>
__device__ inline float gelu_gated(float gate, float up) {
    const float twice = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    if constexpr (std::is_same_v<T, float>) {
        return up * (gate / (1.f + expf(-twice)));
    } else {
        return up * __fdividef(gate, 1.f + __expf(-twice));
    }
}

}  // namespace turbomill::cuda
