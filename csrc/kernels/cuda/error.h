// CUDA errors as exceptions. An error after a kernel ran is usually sticky: every later call fails too, so
// the step that meets it, and all after it, fail rather than return wrong tokens.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace turbomill::cuda {

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // an error that is not sticky must not be reported again by the next launch
    throw CudaError(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) {
    check(cudaGetLastError(), kernel);
}

}  // namespace turbomill::cuda
