// Element types, reductions and the switch from a DType to a template argument.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "core/dtype.h"
#include "kernels/cuda/error.h"

namespace turbomill::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline float to_float(float v) {
    return v;
}
__device__ inline float to_float(__half v) {
    return __half2float(v);
}
__device__ inline float to_float(__nv_bfloat16 v) {
    return __bfloat162float(v);
}

template <class T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
    return v;
}
template <>
__device__ inline __half from_float<__half>(float v) {
    return __float2half_rn(v);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}

// Eight consecutive elements, aligned to their size, as fp32 and back.
__device__ inline void load8(const float* source, float (&v)[8]) {
    const float4 a = reinterpret_cast<const float4*>(source)[0],
                 b = reinterpret_cast<const float4*>(source)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <class T>
__device__ inline void load8(const T* source, float (&v)[8]) {
    const uint4 words = *reinterpret_cast<const uint4*>(source);
    const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = to_float(elements[i]);
}
__device__ inline void store8(float* target, const float (&v)[8]) {
    reinterpret_cast<float4*>(target)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(target)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
template <class T>
__device__ inline void store8(T* target, const float (&v)[8]) {
    uint4 words;
    T* elements = reinterpret_cast<T*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = from_float<T>(v[i]);
    *reinterpret_cast<uint4*>(target) = words;
}

// fn.operator()<T>() for the type that `type` names.
template <class F>
void with_type(DType type, F&& fn) {
    switch (type) {
        case DType::F32:
            return fn.template operator()<float>();
        case DType::F16:
            return fn.template operator()<__half>();
        case DType::BF16:
            return fn.template operator()<__nv_bfloat16>();
        case DType::U8:
        case DType::I32:
            break;
    }
    throw std::invalid_argument("no kernel for activations of whole numbers");
}

// The same for the 16-bit types.
template <class F>
void with_half_type(DType type, F&& fn) {
    if (type == DType::F16) return fn.template operator()<__half>();
    if (type == DType::BF16) return fn.template operator()<__nv_bfloat16>();
    throw std::invalid_argument("this kernel needs float16 or bfloat16 activations");
}

// fn.operator()<Policy>() for a layer's quant_policy.
template <class F>
auto with_policy(int policy, F&& fn) {
    switch (policy) {
        case 0:
            return fn.template operator()<0>();
        case 8:
            return fn.template operator()<8>();
        case 4:
            return fn.template operator()<4>();
        case 84:
            return fn.template operator()<84>();
        case 16:
            return fn.template operator()<16>();
        case 17:
            return fn.template operator()<17>();
        default:
            throw std::invalid_argument("no kernel for this quant_policy");
    }
}

__device__ inline float warp_sum(float v) {
    for (int mask = 16; mask; mask /= 2) v += __shfl_xor_sync(kFullWarp, v, mask);
    return v;
}
__device__ inline float warp_max(float v) {
    for (int mask = 16; mask; mask /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, mask));
    return v;
}
__device__ inline float warp_min(float v) {
    for (int mask = 16; mask; mask /= 2) v = fminf(v, __shfl_xor_sync(kFullWarp, v, mask));
    return v;
}

// 2^v; below the normal range it is 0.
__device__ inline float power_of_two(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

inline int blocks_for(int64_t n, int per_block) {
    return int((n + per_block - 1) / per_block);
}

}  // namespace turbomill::cuda
