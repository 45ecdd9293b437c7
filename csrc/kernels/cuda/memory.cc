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
    check(cudaMallocHost(&data, bytes), "cudaMallocHost");
    data_.reset(data);
}

}  // namespace turbomill::cuda
