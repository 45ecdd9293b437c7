// Arithmetic on attention scores that the kernels share.
#pragma once

#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// Raw products to capped scores: cap * tanh(scale * x / cap), in units of `scale` again, so that what follows
// is the same with and without a cap. By one exponential: tanh(u) = 1 - 2 / (exp(2 u) + 1), some 2^-21 of the
// cap off.
struct SoftCap {
    float twice, cap;

    __device__ SoftCap(float scale, float softcap)
        : twice(2.f * kLog2E * scale / softcap), cap(softcap / scale) {}

    __device__ float operator()(float x) const {
        return cap - __fdividef(2.f * cap, power_of_two(x * twice) + 1.f);
    }
};

}  // namespace turbomill::cuda
