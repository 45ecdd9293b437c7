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

// Four 8 x 8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8. Lane 4g + t gets columns 2t,
// 2t + 1 of row g of each; transposed, rows 2t, 2t + 1 of column g.
__device__ inline void load_matrices(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void load_matrices(unsigned (&r)[4], const void* shared) {
    load_matrices(r, unsigned(__cvta_generic_to_shared(shared)));
}
__device__ inline void load_transposed(unsigned (&r)[4], const void* shared) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Copies 16 bytes to shared memory without waiting; the last 16 - `bytes` become zeros.
__device__ inline void copy_async(const void* shared, const void* global, int bytes) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes)
                 : "memory");
}
// Ends a group of copies; wait_copies<N>() waits until at most the N latest groups are under way.
__device__ inline void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Two floats rounded to T, as the 32 bits that mma takes.
template <class T>
__device__ inline unsigned pack_pair(float x, float y) {
    const auto pair = Pair<T>::pack(x, y);
    return reinterpret_cast<const unsigned&>(pair);
}

}  // namespace turbomill::cuda
