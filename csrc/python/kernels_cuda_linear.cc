// Linears on the GPU, for tests.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "kernels/cuda/linear.h"
#include "python/cuda_array.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using cuda::check;

Floats dense_linear(const Floats& x, const Floats& w, const Floats& bias, const std::string& dtype,
                    const std::string& out_dtype) {
    const DType type = parse_dtype(dtype), out = parse_dtype(out_dtype);
    const int rows = int(x.shape(0)), n = int(w.shape(0)), k = int(w.shape(1));
    const DeviceArray input(x, type), weight(w, type), biases(bias, DType::F32), y(out, size_t(rows) * n);
    cuda::DeviceLinear linear;
    linear.n = n;
    linear.k = k;
    linear.dense = weight.as<void>();
    linear.bias = bias.size() ? biases.as<float>() : nullptr;
    cuda::LinearRunner(type, 0, nullptr)(linear, input.as<void>(), rows, y.as<void>(), out);
    return y.array({rows, n});
}

// `way`: "in_place", "as_dense", "fused" or "gated" with `plan`, or "" for the one that the engine takes.
Floats w4_linear(const Floats& x, const Bytes& codes, const Bits16& scales,
                 const std::optional<Bits16>& zeros, int n, int k, const Floats& bias,
                 const std::string& dtype, const std::string& scale_dtype, const std::string& out_dtype,
                 const std::string& way, const std::optional<PlanTuple>& plan) {
    const DType type = parse_dtype(dtype), out = parse_dtype(out_dtype);
    require(codes.ndim() == 5 && scales.ndim() == 3,
            "codes must be [N/64, K/64, 4, 32, 16], scales [N/64, G, 64]");
    require(x.ndim() == 2 && x.shape(1) == k, "x must be [M, K]");
    const int columns = way == "gated" ? n / 2 : n;
    const int rows = int(x.shape(0)), k_tiles = int(codes.shape(1)), groups = int(scales.shape(1));
    const DeviceArray input(x, type), code_bytes(codes.data(), codes.nbytes()),
        scale_bytes(scales.data(), scales.nbytes()), biases(bias, DType::F32), y(out, size_t(rows) * columns);
    const std::optional<DeviceArray> zero_bytes =
        zeros ? std::make_optional<DeviceArray>(zeros->data(), zeros->nbytes()) : std::nullopt;
    cuda::DeviceLinear linear;
    linear.n = n;
    linear.k = k;
    linear.bias = bias.size() ? biases.as<float>() : nullptr;
    linear.w4 = {code_bytes.as<uint8_t>(),
                 scale_bytes.as<void>(),
                 zero_bytes ? zero_bytes->as<void>() : nullptr,
                 parse_dtype(scale_dtype) == DType::BF16,
                 n,
                 k,
                 k_tiles,
                 groups,
                 k_tiles * 64 / groups};
    cuda::LinearRunner run(type, size_t(n) * k, nullptr);
    if (way == "in_place") {
        run.w4_in_place(linear, input.as<void>(), rows, y.as<void>(), out);
    } else if (way == "as_dense") {
        run.w4_as_dense(linear, input.as<void>(), rows, y.as<void>(), out);
    } else if (way == "gated") {
        require(plan.has_value(), "the fused kernels need a plan");
        cuda::w4_fused(type, out, linear.w4, input.as<void>(), linear.bias, y.as<void>(), rows,
                       plan_of(*plan), 132, false, nullptr, true);
    } else if (way == "fused") {
        require(plan && cuda::w4_fused_fits(type, linear.w4, input.as<void>()),
                "the fused kernels do not fit here, or there is no plan");
        run.w4_fused(linear, input.as<void>(), rows, y.as<void>(), out, plan_of(*plan));
    } else {
        run(linear, input.as<void>(), rows, y.as<void>(), out);
    }
    return y.array({rows, columns});
}

// `count` products one after the other, each with the result of the last: x, then W x, W W x, ... of a square
// W. By the plan for overlapping launches either way: another one may add in another order.
Floats w4_chain(const Floats& x, const Bytes& codes, const Bits16& scales, int count,
                const std::string& dtype, bool overlap) {
    const DType type = parse_dtype(dtype);
    const int rows = int(x.shape(0)), k = int(x.shape(1)), groups = int(scales.shape(1));
    const DeviceArray first(x, type), second(type, size_t(rows) * k),
        code_bytes(codes.data(), codes.nbytes()), scale_bytes(scales.data(), scales.nbytes());
    cuda::DeviceLinear linear;
    linear.n = linear.k = k;
    linear.w4 = {code_bytes.as<uint8_t>(),
                 scale_bytes.as<void>(),
                 nullptr,
                 type == DType::BF16,
                 k,
                 k,
                 k / 64,
                 groups,
                 k / groups};
    cuda::LinearRunner run(type, size_t(k) * k, nullptr);
    run.set_overlap(overlap);
    int device = 0, multiprocessors = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "chain");
    const cuda::W4Plan plan = cuda::choose_w4_plan(k, k, rows, multiprocessors, true);
    for (int i = 0; i < count; ++i)
        run.w4_fused(linear, (i % 2 ? second : first).as<void>(), rows, (i % 2 ? first : second).as<void>(),
                     type, plan);
    return (count % 2 ? second : first).array({rows, k});
}

}  // namespace

void register_kernels_cuda_linear(py::module_& m) {
    const Floats none(0);
    m.def("dense_linear", &dense_linear, py::arg("x"), py::arg("w"), py::arg("bias") = none, py::arg("dtype"),
          py::arg("out_dtype"));
    m.def("w4_linear", &w4_linear, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("zeros"),
          py::arg("n"), py::arg("k"), py::arg("bias") = none, py::arg("dtype"), py::arg("scale_dtype"),
          py::arg("out_dtype"), py::arg("way") = "", py::arg("plan") = py::none());
    m.def("w4_chain", &w4_chain, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("count"),
          py::arg("dtype"), py::arg("overlap"));
}

}  // namespace turbomill::python

#endif
