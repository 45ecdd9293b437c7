// From the words in which checkpoints hold 4-bit codes to the store's tiles, without the codes between.
#pragma once

#include <cstdint>
#include <vector>

#include "store/fused_rows.h"

namespace turbomill {

// How eight codes share a 32-bit word.
enum class Packing {
    kAwq,  // [K, N/8]: of eight neighbouring rows of w, in AWQ gemm's order
    kKN,   // [K/8, N]: of eight neighbouring columns, low nibbles first (GPTQ)
    kNK,   // [N, K/8]: likewise (compressed-tensors)
};

struct WordParts {
    Packing packing;
    std::vector<const uint32_t*> parts;
    FusedRows rows;  // sizes, and the block where there is one, are multiples of 8
    int k;           // a multiple of 8
};

// The rows of tiles [first, first + count) of the fused linear, as w4.n64k64: uint8 [count, ceil(K/64), 4,
// 32, 16].
void pack_words(const WordParts& words, int first, int count, uint8_t* out);

}  // namespace turbomill
