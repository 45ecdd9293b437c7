#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cpu/blas.h"
#include "kernels/cpu/int8.h"
#include "kernels/cpu/kernels.h"
#include "python/register.h"
#ifdef TM_CUDA
#include "kernels/cuda/device.h"
#endif

namespace turbomill::python {

namespace py = pybind11;

namespace {

std::vector<std::string> isas() {
    const char* names[8];
    const int count = cpu::available_isas(names, 8);
    return {names, names + count};
}

py::dict build_info() {
    py::dict info;
    std::vector<std::string> backends{"cpu"};
#ifdef TM_CUDA
    backends.push_back("cuda");
#endif
    info["backends"] = backends;
#if defined(TM_X86)
    info["isa"] = std::vector<std::string>{"baseline", "avx2", "avx512"};
#else
    info["isa"] = std::vector<std::string>{"baseline"};
#endif
#if defined(__clang__)
    info["compiler"] = std::string("clang ") + __clang_version__;
#else
    info["compiler"] = std::string("gcc ") + __VERSION__;
#endif
    return info;
}

py::dict cpu_features() {
    std::vector<std::string> found;
#if defined(TM_X86)
    __builtin_cpu_init();
#define TM_FEATURE(name) \
    if (__builtin_cpu_supports(name)) found.push_back(name);
    TM_FEATURE("avx2")
    TM_FEATURE("fma")
    TM_FEATURE("f16c")
    TM_FEATURE("avx512f")
    TM_FEATURE("avx512bw")
    TM_FEATURE("avx512vnni")
    TM_FEATURE("avx512bf16")
#undef TM_FEATURE
#endif
    py::dict features;
    features["isa"] = cpu::kernels().isa;
    features["available"] = isas();
    features["features"] = found;
    features["int8"] = cpu::int8_kernels() != nullptr;
    return features;
}

// [{"name", "capability": (major, minor), "free_bytes", "total_bytes"}], by number.
py::list cuda_devices() {
    py::list found;
#ifdef TM_CUDA
    for (const auto& device : cuda::devices()) {
        py::dict entry;
        entry["name"] = device.name;
        entry["capability"] = py::make_tuple(device.major, device.minor);
        entry["free_bytes"] = device.free_bytes;
        entry["total_bytes"] = device.total_bytes;
        found.append(entry);
    }
#endif
    return found;
}

}  // namespace

void register_system(py::module_& m) {
    m.def("build_info", &build_info, "What was compiled in.");
    m.def("cuda_devices", &cuda_devices, "GPUs that the cuda backend could run on; empty without one.");
    m.def("cpu_features", &cpu_features, "What this CPU has and which kernels were chosen.");
    m.def("load_blas", &cpu::load_blas, py::arg("path"), "Open the BLAS library the CPU backend uses.");
}

}  // namespace turbomill::python
