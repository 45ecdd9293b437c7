// Linears of packed weights with activations of whole numbers, for CPUs that multiply bytes (AVX-512 VNNI). A
// row of activations is quantized by blocks of 64 inputs, symmetrically: x = scale * q, |q| <= 127 for one
// byte, |q| <= 127 * 256 for two, of which each is multiplied by itself.
#pragma once

#include <cstdint>

#include "kernels/cpu/kernels.h"

namespace turbomill::cpu {

constexpr int kByteLanes = 8;

// Activations in the order in which codes lie: q = 256 high + low, or high alone. Rows come in blocks of
// `lanes`, side by side, so that a loop over a block's rows has fixed offsets; blocks follow one another.
struct Int8Rows {
    const int8_t* high;   // [rows / lanes, k_tiles, 16, lanes, 4]: words of four inputs
    const int8_t* low;    // the same, or null
    const float* scales;  // [rows / lanes, k_tiles, lanes]
    const float* sums;    // [rows / lanes, k_tiles, 2, lanes]: scale times the sum of q over 32 inputs
    int rows, k_tiles;
    int lanes;  // kByteLanes, or 1 for a single row
};

struct Int8Kernels {
    // One row: permuted [k_tiles * 64] to bytes, of which there is one for an input when `low` is null,
    // scales and sums. The pointers are the row's in its block.
    void (*quantize)(const float* permuted, int k_tiles, int lanes, int8_t* high, int8_t* low, float* scales,
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
