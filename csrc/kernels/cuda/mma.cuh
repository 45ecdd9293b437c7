// mma.m16n8k16 with fp32 accumulation, for half and bfloat16. Lane l = 4g + t holds, in 32-bit pairs:
// A: (row g, k 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8); B: (k 2t, column g), (2t+8, g);
// C: c0, c1 = (row g, columns 2t, 2t+1), c2, c3 = (row g+8, the same).
#pragma once

#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {

template <class T>
__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ inline void mma<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T>
struct Pair;
template <>
struct Pair<__half> {
    using type = __half2;
    static __device__ type pack(float x, float y) { return __floats2half2_rn(x, y); }
    static __device__ float2 unpack(type v) { return __half22float2(v); }
};
template <>
struct Pair<__nv_bfloat16> {
    using type = __nv_bfloat162;
    static __device__ type pack(float x, float y) { return __floats2bfloat162_rn(x, y); }
    static __device__ float2 unpack(type v) { return __bfloat1622float2(v); }
};

// Two floats rounded to T, as the 32 bits that mma takes.
template <class T>
__device__ inline unsigned pack_pair(float x, float y) {
    const auto pair = Pair<T>::pack(x, y);
    return reinterpret_cast<const unsigned&>(pair);
}

}  // namespace turbomill::cuda
