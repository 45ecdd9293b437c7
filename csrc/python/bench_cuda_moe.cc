// Times a mixture of experts on the GPU: routing, experts, and the way back.
#ifdef TM_CUDA

#include <pybind11/stl.h>

#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/moe.h"
#include "kernels/cuda/stream.h"
#include "python/bench_tools.h"
#include "python/cuda_array.h"
#include "python/register.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

// `bytes` of host memory with random elements in repetition.
std::vector<uint16_t> repeated(size_t bytes, const std::vector<uint16_t>& pattern) {
    std::vector<uint16_t> out(bytes / 2);
    for (size_t at = 0; at < out.size(); at += pattern.size())
        std::copy_n(pattern.begin(), std::min(pattern.size(), out.size() - at), out.begin() + at);
    return out;
}

// The experts of one linear: weights [E, N, K], dense or 4-bit in groups.
struct Stack {
    Stack(int experts, int n, int k, int group, DType type) {
        const size_t elements = size_t(experts) * n * k;
        const auto values = random_halves(kPattern, type, -0.05f, 0.05f);
        const auto few = random_halves(kPattern, type, 0.001f, 0.002f);
        std::mt19937 generator(3);
        std::vector<uint16_t> codes(kPattern);
        for (auto& c : codes) c = uint16_t(generator());
        weight = repeated(group ? elements / 2 : elements * 2, group ? codes : values);
        if (group) scales = repeated(elements / group * 2, few);
        linears.resize(experts);
        for (int e = 0; e < experts; ++e) {
            Linear& w = linears[e];
            w.n = n;
            w.k = k;
            w.dtype = type;
            if (group) {
                w.codes = reinterpret_cast<const uint8_t*>(weight.data()) + size_t(e) * n * k / 2;
                w.scales = scales.data() + size_t(e) * n * k / group;
                w.group = group;
                w.k_tiles = k / 64;
                w.groups = k / group;
            } else {
                w.dense = weight.data() + size_t(e) * n * k;
            }
        }
    }

    std::vector<uint16_t> weight, scales;
    std::vector<Linear> linears;
};

// Microseconds of one layer's experts for each number of rows; `group` 0: 16-bit weights. Rows differ from
// call to call, and so do the experts that they use.
std::vector<double> bench_moe(int hidden, int inter, int experts, int top, const std::vector<int>& rows,
                              int group, const std::string& dtype, int repeats) {
    constexpr int kInputs = 16;
    const DType type = parse_dtype(dtype);
    ModelConfig model;
    model.hidden_size = hidden;
    model.num_experts = experts;
    model.experts_per_token = top;
    model.expert_intermediate_size = inter;
    model.norm_topk_prob = true;
    Stack gate_up(experts, 2 * inter, hidden, group, type), down(experts, hidden, inter, group, type);
    const auto router = random_halves(size_t(experts) * hidden, type, -0.05f, 0.05f);
    Weights weights;
    weights.embedding.dtype = type;
    weights.layers.resize(1);
    Moe& moe = weights.layers[0].moe.emplace();
    moe.router.n = experts;
    moe.router.k = hidden;
    moe.router.dtype = type;
    moe.router.dense = router.data();
    moe.gate_up = std::move(gate_up.linears);
    moe.down = std::move(down.linears);

    const cuda::Stream stream;
    const int most = *std::max_element(rows.begin(), rows.end());
    const cuda::DeviceWeights device(weights, type, stream);
    int index = 0, multiprocessors = 0;
    cuda::check(cudaGetDevice(&index), "cudaGetDevice");
    cuda::check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index), "counting");
    cuda::LinearRunner linear(type, 0, 0, stream);
    cuda::MoeRunner runner(model, weights, most, type, multiprocessors, stream);
    const size_t row_bytes = size_t(hidden) * 2;
    // Of another length than what is repeated, so that no two rows are alike.
    const auto x = random_memory(kInputs * most * row_bytes, random_halves(kPattern + 37, type, -1.f, 1.f));
    const cuda::DeviceMemory y(most * row_bytes, "y", "");
    std::vector<double> times;
    for (const int count : rows)
        times.push_back(time_graph(stream, kInputs, repeats, [&](int i) {
            runner(moe, device, linear, x.as<uint8_t>() + size_t(i) * count * row_bytes, count, y.as());
        }));
    return times;
}

}  // namespace

void register_bench_cuda_moe(py::module_& m) {
    m.def("bench_moe", &bench_moe, py::arg("hidden"), py::arg("inter"), py::arg("experts"), py::arg("top"),
          py::arg("rows"), py::arg("group") = 128, py::arg("dtype") = "bfloat16", py::arg("repeats") = 9);
}

}  // namespace turbomill::python

#endif
