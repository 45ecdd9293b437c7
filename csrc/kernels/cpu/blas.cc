#include "kernels/cpu/blas.h"

#include <dlfcn.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>

namespace turbomill::cpu {
namespace {

constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;  // CBLAS' values

using Sgemm = void (*)(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                       const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                       int64_t ldc);
using SetThreads = void (*)(int);

Sgemm sgemm = nullptr;
std::mutex mutex;

Sgemm loaded() {
    if (!sgemm) throw std::runtime_error("no BLAS library is loaded: call turbomill._core.load_blas first");
    return sgemm;
}

}  // namespace

void load_blas(const std::string& path) {
    std::lock_guard lock(mutex);
    if (sgemm) return;
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(path + ": " + dlerror());
    const auto found = reinterpret_cast<Sgemm>(dlsym(library, "scipy_cblas_sgemm64_"));
    const auto set_threads =
        reinterpret_cast<SetThreads>(dlsym(library, "scipy_openblas_set_num_threads64_"));
    if (!found || !set_threads)
        throw std::runtime_error(path + ": not an OpenBLAS of the scipy-openblas64 wheel");
    // The engine's own pool splits the work; OpenBLAS' threads would only compete with it.
    set_threads(1);
    sgemm = found;
}

void require_blas() {
    loaded();
}

void gemm_nt(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
    loaded()(kRowMajor, kNoTrans, kTrans, m, n, k, 1.f, a, lda, b, ldb, 0.f, c, ldc);
}

void gemm_nn_add(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
    loaded()(kRowMajor, kNoTrans, kNoTrans, m, n, k, 1.f, a, lda, b, ldb, 1.f, c, ldc);
}

}  // namespace turbomill::cpu
