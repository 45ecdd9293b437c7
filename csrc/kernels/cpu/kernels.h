// The CPU's inner loops, compiled once per instruction set and chosen at run time.
// Everything here works on raw pointers, on one thread, and allocates nothing.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/kv_scheme.h"

namespace turbomill::cpu {

// Rows of activations that the small-batch kernels take at once; more rows go to BLAS.
constexpr int kMaxRows = 8;

// A group-quantized weight in the store's layouts w4.n64k64 or w8.n64k64, and group.n64.
struct PackedWeight {
    const uint8_t* codes;  // [N/64, k_tiles, 512 * bits]
    const void* scales;    // [N/64, groups, 64] in dtype
    const void* zeros;     // as scales; null: 8, or 128
    const void* mins;      // as scales, or null: added to code * scale, in place of zeros
    DType dtype;           // F16 or BF16
    int k_tiles, groups, group;
    int bits;  // of a stored code: 4 or 8
};

struct Kernels {
    const char* isa;

    // dst[i] = float(src[i])
    void (*to_float)(DType dtype, const void* src, float* dst, int64_t n);
    void (*from_float)(DType dtype, const float* src, void* dst, int64_t n);

    // y = x * rsqrt(mean(x^2) + eps) * w over one row of h
    void (*rms_norm)(const float* x, const float* w, float* y, int h, float eps);
    // y += x
    void (*add)(const float* x, float* y, int64_t n);
    // x [D] rotated in place by cos, sin [rot/2] (rotate-half: pairs i, i + rot/2)
    void (*rope)(float* x, const float* cos, const float* sin, int half);
    // out[i] = silu(gate[i]) * up[i]; gate_up [2 * inter] interleaves blocks of 8
    void (*silu_gate)(const float* gate_up, float* out, int inter);
    // likewise with gelu's tanh approximation
    void (*gelu_gate)(const float* gate_up, float* out, int inter);
    // x[i] = cap * tanh(x[i] * scale / cap)
    void (*softcap)(float* x, int64_t n, float scale, float cap);

    // y[m * ldy + n] = sum_k x[m * ldx + k] * w[n * k_dim + k] for n in [n0, n1), m < rows <= kMaxRows
    void (*linear_dense)(DType dtype, const void* w, const float* x, int64_t ldx, float* y, int64_t ldy,
                         int rows, int k_dim, int n0, int n1);

    // x [rows, k] to the order in which codes lie: dst [rows, k_tiles * 64], zero-padded
    void (*permute_packed)(const float* x, int64_t ldx, float* dst, int rows, int k, int k_tiles);
    // 16 rows of the weight, sub-tile `sub` (= n / 16), against permuted activations [rows, k_tiles * 64];
    // writes y[m * ldy + i], i < n_count <= 16
    void (*linear_packed)(const PackedWeight& w, int sub, const float* permuted, float* y, int64_t ldy,
                          int rows, int n_count);
    // 16 rows of the weight as fp32, columns in the order of permute_packed: dst [16, k_tiles * 64]
    void (*dequant_packed)(const PackedWeight& w, int sub, float* dst);

    // One token's head as codes and params = (scale, zero), fp16; integers span the row from its least to its
    // greatest element.
    void (*kv_quantize)(KvFormat format, const float* x, int d, uint8_t* codes, uint16_t* params);
    void (*kv_dequantize)(KvFormat format, const uint8_t* codes, const uint16_t* params, int d, float* dst);
    // x [d] times the orthonormal Walsh-Hadamard matrix of `block` elements, a power of two, block by block:
    // its own inverse
    void (*hadamard)(float* x, int d, int block);

    // One row and one block of online softmax: `count` scores are scaled by `scale`, the running max and sum
    // are updated, scores become exp(score - max), and out [d] is rescaled to the new max.
    void (*softmax_step)(float* scores, int count, float scale, float* max, float* sum, float* out, int d);
    // out [d] += sum_t p[t] * v[t * d + i]
    void (*weighted_sum)(const float* p, const float* v, int count, int d, float* out);
};

// The best set this CPU runs. `isa` "" chooses; a name ("baseline", "avx2", "avx512") asks for that one and
// throws std::invalid_argument if it is not compiled in or the CPU lacks it.
const Kernels& kernels(const char* isa = "");

// Names of the compiled sets that this CPU can run, best last.
int available_isas(const char** names, int capacity);

}  // namespace turbomill::cpu
