// Linears of packed weights with activations of whole numbers, for CPUs that multiply bytes (AVX-512 VNNI). A
// row of activations is quantized by blocks of 64 inputs, symmetrically: x = scale * q, |q| <= 127 for one
// byte, |q| <= 127 * 256 for two, of which each is multiplied by itself.
#pragma once

#include <cstdint>

#include "kernels/cpu/kernels.h"

namespace turbomill::cpu {

// Activations [rows, k_tiles * 64] in the order in which codes lie: q = 256 high + low, or high alone.
struct Int8Rows {
    const int8_t* high;   // [rows, k_tiles * 64]
    const int8_t* low;    // the same, or null
    const float* scales;  // [rows, k_tiles]
    const float* sums;    // [rows, 2 k_tiles]: scale times the sum of q over each half of 32 inputs
    int rows, k_tiles;
};

struct Int8Kernels {
    // One row: permuted [k_tiles * 64] to bytes, of which there is one for an input when `low` is null,
    // scales and sums.
    void (*quantize)(const float* permuted, int k_tiles, int8_t* high, int8_t* low, float* scales,
                     float* sums);
    // 16 rows of the weight, sub-tile `sub`, against `x`: writes y[m * ldy + i], i < n_count <= 16. `scratch`
    // has scratch_bytes(x.rows) bytes, aligned to 64.
    void (*linear)(const PackedWeight& w, int sub, const Int8Rows& x, float* y, int64_t ldy, int n_count,
                   uint8_t* scratch);
    int64_t (*scratch_bytes)(int rows);
};

// Null where this CPU, or this build, has no such instructions.
const Int8Kernels* int8_kernels();

}  // namespace turbomill::cpu
