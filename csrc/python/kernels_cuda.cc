// Single GPU kernels on numpy arrays, so that tests can hold each against a reference, and the benchmarks'
// timers. Values pass as fp32; each call rounds its inputs to `dtype`, copies them to the current GPU,
// poisons the outputs, runs, and copies back.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "python/cuda_array.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

// y = rms_norm(x) * w of values [rows, h] in `dtype`, in place.
Floats narrow_rms_norm(const Floats& x, const Floats& w, float eps, const std::string& dtype) {
    const DType type = parse_dtype(dtype);
    const int rows = int(x.shape(0)), h = int(x.shape(1));
    const DeviceArray values(x, type), weight(w, DType::F32);
    cuda::rms_norm(
        type,
        {nullptr, values.as<void>(), nullptr, false, weight.as<float>(), values.as<void>(), rows, h, eps},
        nullptr);
    return values.array({rows, h});
}

Floats rms_norm(const Floats& x, const std::optional<Floats>& delta, const Floats& w, float eps,
                const std::string& dtype) {
    const DType type = parse_dtype(dtype);
    const int rows = int(x.shape(0)), h = int(x.shape(1));
    const DeviceArray residual(x, DType::F32), weight(w, DType::F32), y(type, size_t(rows) * h);
    const std::optional<DeviceArray> added =
        delta ? std::make_optional<DeviceArray>(*delta, type) : std::nullopt;
    cuda::rms_norm(type,
                   {residual.as<float>(), added ? added->as<void>() : nullptr, nullptr, true,
                    weight.as<float>(), y.as<void>(), rows, h, eps},
                   nullptr);
    if (delta) {  // the residual too, below the result
        Floats both({py::ssize_t(2), py::ssize_t(rows), py::ssize_t(h)});
        y.read(both.mutable_data());
        residual.read(both.mutable_data() + size_t(rows) * h);
        return both;
    }
    return y.array({rows, h});
}

// `activation`: silu or gelu_tanh.
Floats gate(const Floats& gate_up, const std::string& activation, const std::string& dtype) {
    const DType type = parse_dtype(dtype);
    const int rows = int(gate_up.shape(0)), inter = int(gate_up.shape(1)) / 2;
    const DeviceArray x(gate_up, type), y(type, size_t(rows) * inter);
    (activation == "silu" ? cuda::silu_gate : cuda::gelu_gate)(type, x.as<void>(), y.as<void>(), rows, inter,
                                                               nullptr);
    return y.array({rows, inter});
}

// cap * tanh(x / cap)
Floats softcap(const Floats& x, float cap) {
    const DeviceArray values(x, DType::F32);
    cuda::softcap(values.as<float>(), x.size(), cap, nullptr);
    return values.array({x.size()});
}

// Breaks the context of the calling thread's GPU, for this process.
void break_gpu() {
    cuda::illegal_access(nullptr);
    cudaDeviceSynchronize();  // whose error is everyone's
}

// Why a device would be refused where the runtime answered so.
std::string device_refusal(const std::string& name, int status, int count, int driver, int runtime) {
    return cuda::device_refusal(name, {cudaError_t(status), count, driver, runtime});
}

}  // namespace

void register_kernels_cuda(py::module_& parent) {
    py::module_ m = parent.def_submodule("kernels_cuda", "Single GPU kernels on numpy arrays, for tests.");
    m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("delta"), py::arg("w"), py::arg("eps"),
          py::arg("dtype"));
    m.def("narrow_rms_norm", &narrow_rms_norm, py::arg("x"), py::arg("w"), py::arg("eps"), py::arg("dtype"));
    m.def("gate", &gate, py::arg("gate_up"), py::arg("activation"), py::arg("dtype"));
    m.def("softcap", &softcap, py::arg("x"), py::arg("cap"));
    m.def("break_gpu", &break_gpu);
    m.def("device_refusal", &device_refusal, py::arg("name"), py::arg("status"), py::arg("count"),
          py::arg("driver"), py::arg("runtime"));
    m.def("capability_refusal", &cuda::capability_refusal, py::arg("index"), py::arg("major"),
          py::arg("minor"));
    register_kernels_cuda_linear(m);
    register_kernels_cuda_attention(m);
    register_kernels_cuda_moe(m);
    register_kernels_cuda_sampling(m);
    register_bench_cuda(m);
}

}  // namespace turbomill::python

#else

namespace turbomill::python {

void register_kernels_cuda(pybind11::module_&) {}

}  // namespace turbomill::python

#endif
