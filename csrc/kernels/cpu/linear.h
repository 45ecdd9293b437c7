// Linears on the CPU: few rows read the weight once through the inner loops, many rows go through BLAS
// panels.
#pragma once

#include <vector>

#include "core/thread_pool.h"
#include "kernels/cpu/kernels.h"
#include "store/weights.h"

namespace turbomill::cpu {

class LinearRunner {
  public:
    LinearRunner(const Kernels& kernels, ThreadPool& pool) : k_(kernels), pool_(pool), panels_(pool.size()) {}

    // y [rows, N] = x [rows, K] w^T + bias, both contiguous
    void operator()(const Linear& w, const float* x, int rows, float* y);

  private:
    void few_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y);
    void many_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y);
    void add_bias(const Linear& w, int rows, float* y, int n0, int n1) const;
    // Splits N into tasks of at most `most` rows of the weight, balanced over the threads, multiples of 16.
    int chunk(int n, int most) const;

    const Kernels& k_;
    ThreadPool& pool_;
    std::vector<float> gathered_;             // activations in a linear's own order
    std::vector<float> permuted_;             // activations in w4 order
    std::vector<std::vector<float>> panels_;  // per worker: a panel of the weight in fp32
};

}  // namespace turbomill::cpu
