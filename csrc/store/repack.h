// Changes between the byte orders of codes, for the converter. Codes are uint8 [K, N], of 4 bits below 16.
#pragma once

#include <cstdint>
#include <vector>

#include "core/thread_pool.h"
#include "store/fused_rows.h"

namespace turbomill {

// Codes of linears that are fused along N.
struct CodeParts {
    std::vector<const uint8_t*> parts;  // each [K, n]
    FusedRows rows;
};

// To w4.n64k64 (convert/FORMAT.md), uint8 [ceil(N/64), ceil(K/64), 4, 32, 16]; the padding is zero.
void pack_w4(const CodeParts& codes, int k, uint8_t* out, ThreadPool& pool);
// The inverse, without the padding.
void unpack_w4(const uint8_t* packed, int k, int n, uint8_t* codes, ThreadPool& pool);
// The same for w8.n64k64, uint8 [ceil(N/64), ceil(K/64), 4, 8, 2, 64].
void pack_w8(const uint8_t* codes, int k, int n, uint8_t* out, ThreadPool& pool);
void unpack_w8(const uint8_t* packed, int k, int n, uint8_t* codes, ThreadPool& pool);
// AWQ gemm's words [rows, N/8] to uint8 [rows, N]: a word's even columns are its low nibbles, in order.
void unpack_awq(const uint32_t* words, int rows, int n, uint8_t* codes, ThreadPool& pool);
// Words [ceil(K/8), N] of eight rows each, low nibbles first (GPTQ), to uint8 [K, N].
void unpack_nibbles(const uint32_t* words, int k, int n, uint8_t* codes, ThreadPool& pool);

}  // namespace turbomill
