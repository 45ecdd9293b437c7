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

}  // namespace turbomill::cuda
