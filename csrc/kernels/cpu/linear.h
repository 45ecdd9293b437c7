// Linears on the CPU: few rows read the weight once through the inner loops, many rows go through BLAS
// panels. Packed weights may be multiplied with activations of one or two bytes instead: see int8.h.
#pragma once

#include <vector>

#include "core/thread_pool.h"
#include "kernels/cpu/int8.h"
#include "kernels/cpu/kernels.h"
#include "store/weights.h"

namespace turbomill::cpu {

class LinearRunner {
  public:
    // `activation_bits` of 8 or 16 are for every packed weight; 32: fp32. Throws std::invalid_argument where
    // the CPU has no products of bytes.
    // `deterministic`: a row's result does not depend on the rows beside it.
    LinearRunner(const Kernels& kernels, ThreadPool& pool, int activation_bits = 32,
                 bool deterministic = false);

    // y [rows, N] = x [rows, K] w^T + bias, both contiguous
    void operator()(const Linear& w, const float* x, int rows, float* y);

  private:
    void few_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y);
    void many_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y);
    // Rows of bytes that lie side by side. One alone has kernels of its own, which add in another order.
    int lanes(int rows) const { return rows == 1 && !deterministic_ ? 1 : kByteLanes; }
    void byte_rows(const Linear& w, int rows, float* y);
    void add_bias(const Linear& w, int rows, float* y, int n0, int n1) const;
    // Splits N into tasks of at most `most` rows of the weight, balanced over the threads, multiples of 16.
    int chunk(int n, int most) const;

    const Kernels& k_;
    ThreadPool& pool_;
    const Int8Kernels* int8_;  // null: fp32
    bool two_bytes_, deterministic_;
    std::vector<float> gathered_;             // activations in a linear's own order
    std::vector<float> permuted_;             // activations in w4 order
    std::vector<std::vector<float>> panels_;  // per worker: a panel of the weight in fp32
    // With activations of bytes: the rows, and what each worker needs.
    std::vector<int8_t> high_, low_;
    std::vector<float> byte_scales_, byte_sums_;
    std::vector<std::vector<uint8_t>> scratch_;
};

}  // namespace turbomill::cpu
