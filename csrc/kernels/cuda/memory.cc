#include "kernels/cuda/memory.h"

#include "kernels/cuda/error.h"

namespace turbomill::cuda {

void DeviceFree::operator()(void* data) const {
    cudaFree(data);
}

void PinnedFree::operator()(void* data) const {
    cudaFreeHost(data);
}

DeviceMemory::DeviceMemory(size_t bytes, const std::string& what, const std::string& advice) : bytes_(bytes) {
    if (bytes == 0) return;
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        throw CudaError(what + " needs " + std::to_string(bytes) + " bytes of GPU memory, " +
                        std::to_string(free) + " of " + std::to_string(total) + " are free: " + advice);
    }
    check(status, "cudaMalloc");
    data_.reset(data);
}

PinnedMemory::PinnedMemory(size_t bytes) {
    void* data = nullptr;
    const cudaError_t status = cudaMallocHost(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw CudaError("a step's inputs and results need " + std::to_string(bytes) +
                        " bytes of pinned host memory, which the system does not give: lower max_batch_size "
                        "or session_len");
    }
    check(status, "cudaMallocHost");
    data_.reset(data);
}

}  // namespace turbomill::cuda
