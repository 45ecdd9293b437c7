// Which GPUs there are, and choosing one.
#pragma once

#include <cuda_runtime_api.h>

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

// What the runtime says when it is asked for GPUs: versions as 1000 * major + 10 * minor, 0: no driver.
struct FoundDevices {
    cudaError_t status;
    int count, driver, runtime;
};
// Why there is no device of this name among those, in a sentence; empty: there is. Throws
// std::invalid_argument for what is no name of a GPU.
std::string device_refusal(const std::string& name, const FoundDevices& found);
// That this build has no kernels for a GPU of this compute capability, and what to do.
std::string capability_refusal(int index, int major, int minor);

// Makes "cuda" or "cuda:N" current for the calling thread and returns N. Throws CudaError saying in a
// sentence what does not fit: no driver, no such GPU, a GPU these kernels were not built for.
int select_device(const std::string& name);

}  // namespace turbomill::cuda
