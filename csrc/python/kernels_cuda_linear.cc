// Linears on the GPU, for tests.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/linear.h"
#include "python/cuda_array.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using cuda::check;

// `gated`: the fused silu gate; none where that is not fused.
std::optional<Floats> dense_linear(const Floats& x, const Floats& w, const Floats& bias,
                                   const std::string& dtype, const std::string& out_dtype, bool gated) {
    const DType type = parse_dtype(dtype), out = parse_dtype(out_dtype);
    const int rows = int(x.shape(0)), n = int(w.shape(0)), k = int(w.shape(1)), columns = gated ? n / 2 : n;
    const DeviceArray input(x, type), weight(w, type), biases(bias, DType::F32),
        y(out, size_t(rows) * columns);
    cuda::DeviceLinear linear;
    linear.n = n;
    linear.k = k;
    linear.dense = weight.as<void>();
    linear.bias = bias.size() ? biases.as<float>() : nullptr;
    cuda::LinearRunner run(type, 0, 0, nullptr);
    if (!gated) {
        run(linear, input.as<void>(), rows, y.as<void>(), out);
    } else if (!run.silu_gated(linear, input.as<void>(), rows, y.as<void>())) {
        return std::nullopt;
    }
    return y.array({rows, columns});
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
    linear.w4 = {{code_bytes.as<uint8_t>(), scale_bytes.as<void>(),
                  zero_bytes ? zero_bytes->as<void>() : nullptr, parse_dtype(scale_dtype) == DType::BF16, n,
                  k, k_tiles, groups, k_tiles * 64 / groups}};
    cuda::LinearRunner run(type, size_t(n) * k, 0, nullptr);
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

// A w8 weight's tensors on the device.
class W8Arrays {
  public:
    W8Arrays(const Bytes& codes, const Bits16& scales, const std::optional<Bits16>& zeros,
             const std::optional<Bits16>& mins, int n, int k, const std::string& dtype)
        : codes_(codes.data(), codes.nbytes()), scales_(scales.data(), scales.nbytes()) {
        require(codes.ndim() == 6 && scales.ndim() == 3,
                "codes must be [N/64, K/64, 4, 8, 2, 64], scales [N/64, G, 64]");
        const int k_tiles = int(codes.shape(1)), groups = int(scales.shape(1));
        if (zeros) zeros_.emplace(zeros->data(), zeros->nbytes());
        if (mins) mins_.emplace(mins->data(), mins->nbytes());
        linear_.n = n;
        linear_.k = k;
        linear_.w8 = {{codes_.as<uint8_t>(), scales_.as<void>(), zeros_ ? zeros_->as<void>() : nullptr,
                       parse_dtype(dtype) == DType::BF16, n, k, k_tiles, groups, k_tiles * 64 / groups},
                      mins_ ? mins_->as<void>() : nullptr};
    }

    const cuda::DeviceLinear& linear() const { return linear_; }

  private:
    DeviceArray codes_, scales_;
    std::optional<DeviceArray> zeros_, mins_;
    cuda::DeviceLinear linear_;
};

// `way`: "in_place" with `splits` of K (0: chosen), "as_dense" with room for so many dense elements at a time
// (0: all), "fused" or "gated" with `plan`, or "" for the one that the engine takes.
Floats w8_linear(const Floats& x, const Bytes& codes, const Bits16& scales,
                 const std::optional<Bits16>& zeros, const std::optional<Bits16>& mins, int n, int k,
                 const Floats& bias, const std::string& dtype, const std::string& scale_dtype,
                 const std::string& out_dtype, const std::string& way, int splits, size_t room,
                 const std::optional<PlanTuple>& plan) {
    const DType type = parse_dtype(dtype), out = parse_dtype(out_dtype);
    require(x.ndim() == 2 && x.shape(1) == k, "x must be [M, K]");
    const int rows = int(x.shape(0)), columns = way == "gated" ? n / 2 : n;
    const W8Arrays weight(codes, scales, zeros, mins, n, k, scale_dtype);
    const DeviceArray input(x, type), biases(bias, DType::F32), y(out, size_t(rows) * columns);
    cuda::DeviceLinear linear = weight.linear();
    linear.bias = bias.size() ? biases.as<float>() : nullptr;
    cuda::LinearRunner run(type, 0, room ? room : size_t(n) * k, nullptr);
    if (way == "in_place") {
        run.w8_in_place(linear, input.as<void>(), rows, y.as<void>(), out, splits);
    } else if (way == "as_dense") {
        run.w8_as_dense(linear, input.as<void>(), rows, y.as<void>(), out);
    } else if (way == "fused" || way == "gated") {
        require(plan && cuda::w8_fused_fits(type, linear.w8, input.as<void>(), rows),
                "the fused kernels do not fit here, or there is no plan");
        if (way == "gated")
            cuda::w8_fused(type, out, linear.w8, input.as<void>(), linear.bias, y.as<void>(), rows,
                           plan_of(*plan), 132, false, nullptr, true);
        else
            run.w8_fused(linear, input.as<void>(), rows, y.as<void>(), out, plan_of(*plan));
    } else {
        run(linear, input.as<void>(), rows, y.as<void>(), out);
    }
    return y.array({rows, columns});
}

// Rows of an embedding with codes, fp32 [T, K]; an id below 0 means last[-1 - id].
Floats embed_w8(const std::vector<int>& ids, const std::vector<int>& last, const Bytes& codes,
                const Bits16& scales, const std::optional<Bits16>& zeros, const std::optional<Bits16>& mins,
                int n, int k, const std::string& scale_dtype, float factor) {
    const W8Arrays table(codes, scales, zeros, mins, n, k, scale_dtype);
    const DeviceArray tokens(ids.data(), ids.size() * sizeof(int)),
        last_tokens(last.data(), last.size() * sizeof(int)), x(DType::F32, ids.size() * k);
    cuda::embed_w8(table.linear().w8, tokens.as<int>(), last_tokens.as<int>(), factor, x.as<float>(),
                   int(ids.size()), nullptr);
    return x.array({py::ssize_t(ids.size()), k});
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
    linear.w4 = {{code_bytes.as<uint8_t>(), scale_bytes.as<void>(), nullptr, type == DType::BF16, k, k,
                  k / 64, groups, k / groups}};
    cuda::LinearRunner run(type, size_t(k) * k, 0, nullptr);
    run.set_overlap(overlap);
    const cuda::FusedPlan plan = cuda::choose_fused_plan(4, k, k, rows, multiprocessors(), true);
    for (int i = 0; i < count; ++i)
        run.w4_fused(linear, (i % 2 ? second : first).as<void>(), rows, (i % 2 ? first : second).as<void>(),
                     type, plan);
    return (count % 2 ? second : first).array({rows, k});
}

// As w4_chain; or, not `fused`, in place by w8_rows.
Floats w8_chain(const Floats& x, const Bytes& codes, const Bits16& scales, int count,
                const std::string& dtype, bool overlap, bool fused) {
    const DType type = parse_dtype(dtype);
    const int rows = int(x.shape(0)), k = int(x.shape(1));
    const DeviceArray first(x, type), second(type, size_t(rows) * k);
    const W8Arrays weight(codes, scales, std::nullopt, std::nullopt, k, k, dtype);
    cuda::LinearRunner run(type, 0, size_t(k) * k, nullptr);
    run.set_overlap(overlap);
    const cuda::FusedPlan plan = cuda::choose_fused_plan(8, k, k, rows, multiprocessors(), true);
    for (int i = 0; i < count; ++i) {
        void *from = (i % 2 ? second : first).as<void>(), *to = (i % 2 ? first : second).as<void>();
        if (fused)
            run.w8_fused(weight.linear(), from, rows, to, type, plan);
        else
            run.w8_in_place(weight.linear(), from, rows, to, type);
    }
    return (count % 2 ? second : first).array({rows, k});
}

// What a store's weights take in device memory.
size_t weight_bytes(const ModelConfig& model, const std::vector<TensorRef>& tensors) {
    const Weights weights(model, tensors);
    return cuda::DeviceWeights(weights, cuda::activation_type(weights), nullptr).bytes();
}

}  // namespace

void register_kernels_cuda_linear(py::module_& m) {
    const Floats none(0);
    m.def("dense_linear", &dense_linear, py::arg("x"), py::arg("w"), py::arg("bias") = none, py::arg("dtype"),
          py::arg("out_dtype"), py::arg("gated") = false);
    m.def("w4_linear", &w4_linear, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("zeros"),
          py::arg("n"), py::arg("k"), py::arg("bias") = none, py::arg("dtype"), py::arg("scale_dtype"),
          py::arg("out_dtype"), py::arg("way") = "", py::arg("plan") = py::none());
    m.def("w8_linear", &w8_linear, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("zeros"),
          py::arg("mins"), py::arg("n"), py::arg("k"), py::arg("bias") = none, py::arg("dtype"),
          py::arg("scale_dtype"), py::arg("out_dtype"), py::arg("way") = "", py::arg("splits") = 0,
          py::arg("room") = 0, py::arg("plan") = py::none());
    m.def("embed_w8", &embed_w8, py::arg("ids"), py::arg("last"), py::arg("codes"), py::arg("scales"),
          py::arg("zeros"), py::arg("mins"), py::arg("n"), py::arg("k"), py::arg("scale_dtype"),
          py::arg("factor") = 1.f);
    m.def("weight_bytes", &weight_bytes, py::arg("model"), py::arg("tensors"));
    m.def("w8_chain", &w8_chain, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("count"),
          py::arg("dtype"), py::arg("overlap"), py::arg("fused") = false);
    m.def("w4_chain", &w4_chain, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("count"),
          py::arg("dtype"), py::arg("overlap"));
}

}  // namespace turbomill::python

#endif
