// wgmma.m64nNk16 with A in registers and fp32 accumulation: a warpgroup's d [64, N] += a [64, 16] b [16, N].
// Warp w of the warpgroup owns rows 16w..16w+15; its fragments of A and of each eight columns of D are those
// of mma.m16n8k16 (mma.cuh). B lies in shared memory as N rows of 64 values of K, 128 bytes each, in the
// copy engine's 128-byte swizzle.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/hopper.cuh"

namespace turbomill::cuda {

// B, by its address / 16 in shared memory, a multiple of 1024 bytes plus 32 for each 16 columns of K.
__device__ inline unsigned swizzled_rows(unsigned shared) {
    return (shared & 0x3ffff) >> 4;
}
__device__ inline uint64_t describe(unsigned rows) {
    constexpr unsigned kSwizzle128 = 1u << 30, kEightRows = 1024 / 16, kUnused = 1u << 16;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(rows | kUnused), "r"(kSwizzle128 | kEightRows));
    return descriptor;
}
// B turned: rows of K, each of 64 columns of N, as 128 bytes in the same swizzle; the next 64 columns lie
// `Panel` bytes further. `rows`: as above, 128 more for each 16 rows of K.
template <int Panel>
__device__ inline uint64_t describe_turned(unsigned rows) {
    constexpr unsigned kSwizzle128 = 1u << 30, kEightRows = 1024 / 16, kPanel = Panel / 16 << 16;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(rows | kPanel), "r"(kSwizzle128 | kEightRows));
    return descriptor;
}

// Before the first product, and after registers of its operands were written.
__device__ inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group of products.
__device__ inline void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the N latest groups are under way.
template <int N>
__device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define TM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TM_D8(i) TM_D4(i), TM_D4(i + 4)
#define TM_D16(i) TM_D8(i), TM_D8(i + 8)
#define TM_D32(i) TM_D16(i), TM_D16(i + 16)
#define TM_D64(i) TM_D32(i), TM_D32(i + 32)
#define TM_D96(i) TM_D64(i), TM_D32(i + 64)
#define TM_D128(i) TM_D64(i), TM_D64(i + 64)
#define TM_N4 "%0,%1,%2,%3"
#define TM_N8 TM_N4 ",%4,%5,%6,%7"
#define TM_N16 TM_N8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TM_N32 TM_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TM_N64                                                                                          \
    TM_N32                                                                                              \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63"
#define TM_N96                                                                                          \
    TM_N64                                                                                              \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
    "%88,%89,%90,%91,%92,%93,%94,%95"
#define TM_N128                                                                                             \
    TM_N96                                                                                                  \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116" \
    ",%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// D: list of half as many registers as columns; a0..trans: the operands that follow them.
#define TM_WGMMA(columns, type, registers, names, a0, a1, a2, a3, b, keep, trans)                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " keep ", 0; wgmma.mma_async.sync.aligned.m64n" columns \
                 "k16.f32." type "." type " {" names "}, {" a0 "," a1 "," a2 "," a3 "}, " b             \
                 ", p, 1, 1, " trans ";}"                                                               \
                 : registers(0)                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add), "n"(Turned ? 1 : 0))
// The same with A in shared memory.
#define TM_WGMMA_SHARED(columns, type, registers, names, a, b, keep)                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " keep ", 0; wgmma.mma_async.sync.aligned.m64n" columns \
                 "k16.f32." type "." type " {" names "}, " a ", " b ", p, 1, 1, 0, 0;}"                 \
                 : registers(0)                                                                         \
                 : "l"(a_rows), "l"(rows), "r"(add))

#define TM_WGMMA_BY_COLUMNS(type)                                                                        \
    if constexpr (N == 32) {                                                                             \
        TM_WGMMA("32", type, TM_D16, TM_N16, "%16", "%17", "%18", "%19", "%20", "%21", "%22");           \
    } else if constexpr (N == 64) {                                                                      \
        TM_WGMMA("64", type, TM_D32, TM_N32, "%32", "%33", "%34", "%35", "%36", "%37", "%38");           \
    } else if constexpr (N == 128) {                                                                     \
        TM_WGMMA("128", type, TM_D64, TM_N64, "%64", "%65", "%66", "%67", "%68", "%69", "%70");          \
    } else if constexpr (N == 192) {                                                                     \
        TM_WGMMA("192", type, TM_D96, TM_N96, "%96", "%97", "%98", "%99", "%100", "%101", "%102");       \
    } else {                                                                                             \
        static_assert(N == 256);                                                                         \
        TM_WGMMA("256", type, TM_D128, TM_N128, "%128", "%129", "%130", "%131", "%132", "%133", "%134"); \
    }

#define TM_WGMMA_SHARED_BY_COLUMNS(type)                                        \
    if constexpr (N == 8) {                                                     \
        TM_WGMMA_SHARED("8", type, TM_D4, TM_N4, "%4", "%5", "%6");             \
    } else if constexpr (N == 16) {                                             \
        TM_WGMMA_SHARED("16", type, TM_D8, TM_N8, "%8", "%9", "%10");           \
    } else if constexpr (N == 64) {                                             \
        TM_WGMMA_SHARED("64", type, TM_D32, TM_N32, "%32", "%33", "%34");       \
    } else if constexpr (N == 32) {                                             \
        TM_WGMMA_SHARED("32", type, TM_D16, TM_N16, "%16", "%17", "%18");       \
    } else if constexpr (N == 256) {                                            \
        TM_WGMMA_SHARED("256", type, TM_D128, TM_N128, "%128", "%129", "%130"); \
    } else {                                                                    \
        static_assert(N == 128);                                                \
        TM_WGMMA_SHARED("128", type, TM_D64, TM_N64, "%64", "%65", "%66");      \
    }

// Queues d = a b (`add` 0) or d += a b. Nobody may touch d or a before products_wait. Turned: B lies as 16
// rows of K of N values (describe_turned).
template <class T, int N, bool Turned = false>
__device__ inline void queue_product(float (&d)[N / 2], const unsigned* a, uint64_t rows, int add) {
    if constexpr (std::is_same_v<T, __half>) {
        TM_WGMMA_BY_COLUMNS("f16")
    } else {
        TM_WGMMA_BY_COLUMNS("bf16")
    }
}

// The same with A in shared memory, in rows of 64 values of K as B.
template <class T, int N>
__device__ inline void queue_shared_product(float (&d)[N / 2], uint64_t a_rows, uint64_t rows, int add) {
    if constexpr (std::is_same_v<T, __half>) {
        TM_WGMMA_SHARED_BY_COLUMNS("f16")
    } else {
        TM_WGMMA_SHARED_BY_COLUMNS("bf16")
    }
}

// After products_wait: what the products wrote is not read, nor computed with, any earlier.
template <int N>
__device__ inline void products_land(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#undef TM_WGMMA_SHARED_BY_COLUMNS
#undef TM_WGMMA_SHARED
#undef TM_WGMMA_BY_COLUMNS
#undef TM_WGMMA

}  // namespace turbomill::cuda
