#include "kernels/cuda/device.h"

#include <charconv>
#include <stdexcept>

#include "kernels/cuda/error.h"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {
namespace {

int parse_index(const std::string& name) {
    if (name == "cuda") return 0;
    int index = -1;
    const char* end = name.data() + name.size();
    if (name.rfind("cuda:", 0) == 0 && name.size() > 5) {
        const auto [rest, error] = std::from_chars(name.data() + 5, end, index);
        if (error == std::errc() && rest == end && index >= 0) return index;
    }
    throw std::invalid_argument("device is '" + name + "', expected cpu, cuda or cuda:N");
}

std::string version(int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
}

}  // namespace

std::vector<DeviceInfo> devices() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return {};
    }
    int current = 0;
    cudaGetDevice(&current);
    std::vector<DeviceInfo> found;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties;
        DeviceInfo info;
        check(cudaGetDeviceProperties(&properties, i), "reading a GPU's properties");
        check(cudaSetDevice(i), "choosing a GPU");
        check(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "reading a GPU's free memory");
        info.name = properties.name;
        info.major = properties.major;
        info.minor = properties.minor;
        found.push_back(info);
    }
    cudaSetDevice(current);
    return found;
}

std::string device_refusal(const std::string& name, const FoundDevices& found) {
    const int index = parse_index(name);
    if (found.status == cudaErrorInsufficientDriver)
        return found.driver == 0
                   ? "no NVIDIA driver is installed, device '" + name + "' cannot be used"
                   : "the NVIDIA driver supports CUDA " + version(found.driver) + ", this build needs " +
                         version(found.runtime) + ": update the driver or use device 'cpu'";
    const int count = found.status == cudaErrorNoDevice ? 0 : found.count;
    if (index >= count)
        return "device is '" + name + "', but this machine has " + std::to_string(count) + " GPU" +
               (count == 1 ? "" : "s");
    return "";
}

std::string capability_refusal(int index, int major, int minor) {
    return "GPU " + std::to_string(index) + " has compute capability " + std::to_string(major) + "." +
           std::to_string(minor) + ", for which this build has no kernels: " +
           (major < 8 ? "they need 8.0 or more, use device 'cpu'"
                      : "rebuild with it in TURBOMILL_CUDA_ARCHITECTURES");
}

int select_device(const std::string& name) {
    FoundDevices found{};
    found.status = cudaGetDeviceCount(&found.count);
    cudaGetLastError();
    cudaDriverGetVersion(&found.driver);
    cudaRuntimeGetVersion(&found.runtime);
    const std::string refusal = device_refusal(name, found);
    if (!refusal.empty()) throw CudaError(refusal);
    if (found.status != cudaErrorNoDevice) check(found.status, "looking for GPUs");
    const int index = parse_index(name);
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "reading the capability");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "reading the capability");
    check(cudaSetDevice(index), "choosing a GPU");
    if (!kernels_fit_device()) throw CudaError(capability_refusal(index, major, minor));
    return index;
}

}  // namespace turbomill::cuda
