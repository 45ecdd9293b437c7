// fp32 matrix products from OpenBLAS (the scipy-openblas64 wheel), opened at run time.
#pragma once

#include <string>

namespace turbomill::cpu {

// Opens the library once; later calls are no-ops. Throws std::runtime_error naming the path.
void load_blas(const std::string& path);

// Throws std::runtime_error when none was. A backend asks when it is made: its threads' tasks must not throw.
void require_blas();

// c [m, n] (row stride ldc) = a [m, k] (lda) times b transposed, b [n, k] (ldb). One thread.
// Throws std::runtime_error when no BLAS was loaded.
void gemm_nt(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc);
// c [m, n] += a [m, k] times b [k, n].
void gemm_nn_add(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc);

}  // namespace turbomill::cpu
