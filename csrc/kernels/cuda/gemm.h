// Dense products by cuBLASLt, with fp32 accumulation. The only part of the backend that needs cuBLAS.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/dtype.h"

namespace turbomill::cuda {

class Gemm {
  public:
    Gemm();
    ~Gemm();

    // y [rows, N] = x [rows, K] w [N, K]^T; x and w in `type`, y in `out` (`type` or F32). The algorithm is
    // chosen at a shape's first use and kept. `stride`: elements from one row of y to the next, N or more.
    void operator()(DType type, DType out, const void* w, const void* x, void* y, int rows, int n, int k,
                    int stride, cudaStream_t stream);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace turbomill::cuda
