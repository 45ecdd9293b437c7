// Which GPUs there are, and choosing one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace turbomill::cuda {

struct DeviceInfo {
    std::string name;
    int major = 0, minor = 0;  // compute capability
    size_t free_bytes = 0, total_bytes = 0;
};

// Empty when there is no GPU or no driver.
std::vector<DeviceInfo> devices();

// Makes "cuda" or "cuda:N" current for the calling thread and returns N. Throws CudaError saying in a
// sentence what does not fit: no driver, no such GPU, a GPU these kernels were not built for.
int select_device(const std::string& name);

}  // namespace turbomill::cuda
