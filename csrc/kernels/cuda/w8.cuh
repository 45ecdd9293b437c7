// Reading the store's w8.n64k64 weights. Lane 4g + t of a sub-tile owns 16 bytes of row g and 16 of row
// g + 8; word j of each is its part of the A fragment of mma.m16n8k16 for the 16 columns 16j: columns 2t,
// 2t + 8, 2t + 1, 2t + 9, a byte each.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/w8_fragment.cuh"

namespace turbomill::cuda {

// Two neighbours of scales, zeros or minima: rows g (x) and g + 8 (y) of a sub-tile, which lie together.
__device__ inline float2 w8_pair(unsigned bits, bool bf16) {
    if (bf16) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
    return __half22float2(reinterpret_cast<const __half2&>(bits));
}

// By shared addresses: 16 bytes that are copied asynchronously, or zeros; stored; read; and a word.
__device__ inline void w8_copy(unsigned shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
__device__ inline void w8_store(unsigned shared, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
__device__ inline uint4 w8_load(unsigned shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared));
    return v;
}
__device__ inline unsigned w8_load_word(unsigned shared) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared));
    return v;
}

// Byte `i` of a word of codes as a number, quicker than a conversion: 2^23 + code, less 2^23.
__device__ inline float w8_code(unsigned word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388608.f;
}

// In a tile, the first of the 64 bytes of a row: their order is that of the four lanes 4g + t.
__device__ inline int w8_row(int row) {
    return row / 16 * 1024 + row % 8 * 128 + row % 16 / 8 * 64;
}

}  // namespace turbomill::cuda
