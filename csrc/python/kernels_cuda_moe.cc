// Parts of a mixture of experts on the GPU, for tests.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/linear.h"
#include "kernels/cuda/moe_launch.h"
#include "python/cuda_array.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

using Ints = py::array_t<int, py::array::c_style | py::array::forcecast>;

std::vector<int> ints(const DeviceArray& array, size_t count) {
    std::vector<int> out(count);
    array.read_bytes(reinterpret_cast<uint8_t*>(out.data()));
    return out;
}

// logits [T, E] -> (chosen, weights [T top], offsets [E + 1], pairs, places [T top])
py::tuple moe_route(const Floats& logits, int top, bool normalise) {
    const int tokens = int(logits.shape(0)), experts = int(logits.shape(1)), pairs = tokens * top;
    const DeviceArray values(logits, DType::F32), chosen(DType::F32, pairs), weights(DType::F32, pairs),
        offsets(DType::F32, experts + 1), pair(DType::F32, pairs), places(DType::F32, pairs);
    cuda::moe_route(values.as<float>(), normalise,
                    {tokens, experts, top, chosen.as<int>(), weights.as<float>(), offsets.as<int>(),
                     pair.as<int>(), places.as<int>()},
                    nullptr);
    return py::make_tuple(ints(chosen, pairs), weights.array({pairs}), ints(offsets, experts + 1),
                          ints(pair, pairs), ints(places, pairs));
}

// y [rows, N] of x [rows, K], whose rows offsets[e] up to offsets[e + 1] meet w [E, N, K]. `way`: "", or
// "fused" or "gated" for Hopper's kernels.
Floats grouped_dense(const Floats& x, const Ints& offsets, const Floats& w, const std::string& dtype,
                     const std::string& way) {
    const DType type = parse_dtype(dtype);
    require(w.ndim() == 3 && offsets.size() == w.shape(0) + 1, "w must be [E, N, K], offsets [E + 1]");
    const int rows = int(x.shape(0)), n = int(w.shape(1)), k = int(w.shape(2)),
              columns = way == "gated" ? n / 2 : n;
    const DeviceArray input(x, type), weights(w, type), where(offsets.data(), offsets.nbytes()),
        y(type, size_t(rows) * columns);
    const cuda::ExpertRows all{where.as<int>(), int(w.shape(0)), rows};
    if (way.empty()) {
        cuda::grouped_dense(type, weights.as<void>(), n, k, input.as<void>(), y.as<void>(), all, nullptr);
    } else {
        require(cuda::grouped_dense_fused_fits(type, k), "Hopper's kernels do not fit here");
        cuda::grouped_dense_fused(type, weights.as<void>(), n, k, input.as<void>(), y.as<void>(), all, 132,
                                  way == "gated", nullptr);
    }
    return y.array({rows, columns});
}

// The same with 4-bit weights, experts stacked. `way`: "in_place", "fused" or "gated".
Floats grouped_w4(const Floats& x, const Ints& offsets, const Bytes& codes, const Bits16& scales,
                  const std::optional<Bits16>& zeros, int n, int k, const std::string& dtype,
                  const std::string& way) {
    const DType type = parse_dtype(dtype);
    require(codes.ndim() == 6 && scales.ndim() == 4,
            "codes must be [E, N/64, K/64, 4, 32, 16], scales [E, N/64, G, 64]");
    const int rows = int(x.shape(0)), experts = int(codes.shape(0)), k_tiles = int(codes.shape(2)),
              groups = int(scales.shape(2)), columns = way == "gated" ? n / 2 : n;
    const DeviceArray input(x, type), where(offsets.data(), offsets.nbytes()),
        code_bytes(codes.data(), codes.nbytes()), scale_bytes(scales.data(), scales.nbytes()),
        y(type, size_t(rows) * columns);
    const std::optional<DeviceArray> zero_bytes =
        zeros ? std::make_optional<DeviceArray>(zeros->data(), zeros->nbytes()) : std::nullopt;
    const cuda::W4View w{code_bytes.as<uint8_t>(),
                         scale_bytes.as<void>(),
                         zero_bytes ? zero_bytes->as<void>() : nullptr,
                         type == DType::BF16,
                         n,
                         k,
                         k_tiles,
                         groups,
                         k_tiles * 64 / groups};
    const cuda::ExpertRows all{where.as<int>(), experts, rows};
    if (way == "in_place") {
        cuda::grouped_w4(type, w, input.as<void>(), y.as<void>(), all, nullptr);
    } else {
        require(cuda::w4_fused_fits(type, w, input.as<void>()), "the fused kernels do not fit here");
        cuda::grouped_w4_fused(type, w, input.as<void>(), y.as<void>(), all, 132, way == "gated", nullptr);
    }
    return y.array({rows, columns});
}

// y [T, H] of sorted rows [T top, H], with a shared expert's rows if there are any.
Floats moe_combine(const Floats& sorted, const Ints& places, const Floats& weights,
                   const std::optional<Floats>& gate, const std::optional<Floats>& shared,
                   const std::string& dtype) {
    const DType type = parse_dtype(dtype);
    const int tokens = int(weights.shape(0)), top = int(weights.shape(1)), h = int(sorted.shape(1));
    const DeviceArray rows(sorted, type), where(places.data(), places.nbytes()), each(weights, DType::F32),
        y(type, size_t(tokens) * h);
    const std::optional<DeviceArray> gates =
        gate ? std::make_optional<DeviceArray>(*gate, DType::F32) : std::nullopt;
    const std::optional<DeviceArray> other =
        shared ? std::make_optional<DeviceArray>(*shared, type) : std::nullopt;
    cuda::Routing routing{tokens, 0, top, nullptr, each.as<float>(), nullptr, nullptr, where.as<int>()};
    cuda::moe_combine(type, rows.as<void>(), routing, gates ? gates->as<float>() : nullptr,
                      other ? other->as<void>() : nullptr, h, y.as<void>(), nullptr);
    return y.array({tokens, h});
}

}  // namespace

void register_kernels_cuda_moe(py::module_& m) {
    m.def("moe_route", &moe_route, py::arg("logits"), py::arg("top"), py::arg("normalise"));
    m.def("grouped_dense", &grouped_dense, py::arg("x"), py::arg("offsets"), py::arg("w"), py::arg("dtype"),
          py::arg("way") = "");
    m.def("grouped_w4", &grouped_w4, py::arg("x"), py::arg("offsets"), py::arg("codes"), py::arg("scales"),
          py::arg("zeros"), py::arg("n"), py::arg("k"), py::arg("dtype"), py::arg("way"));
    m.def("moe_combine", &moe_combine, py::arg("sorted"), py::arg("places"), py::arg("weights"),
          py::arg("gate"), py::arg("shared"), py::arg("dtype"));
}

}  // namespace turbomill::python

#endif
