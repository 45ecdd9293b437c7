// Sampling and what surrounds it on the GPU, for tests.
#include "python/register.h"

#ifdef TM_CUDA

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/edits.h"
#include "kernels/cuda/launch.h"
#include "kernels/sampling.h"
#include "python/cuda_array.h"
#include "python/edit_fields.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

// Tokens of logits [B, V], one set of parameters for all rows but the position, which counts up from
// `position`; -1 for a row that is not finite.
std::vector<int> sample(const Floats& logits, float temperature, int top_k, float top_p, uint64_t seed,
                        uint64_t position, float min_p) {
    require(logits.ndim() == 2, "logits must be [B, V]");
    const int rows = int(logits.shape(0));
    std::vector<cuda::SampleInfo> info(rows);
    const float gap = min_p_gap({temperature, top_k, top_p, seed, min_p});
    for (int r = 0; r < rows; ++r)
        info[r] = {seed, position + uint64_t(r), temperature, top_p, top_k, r, gap, -1};
    const DeviceArray values(logits, DType::F32), parameters(info.data(), info.size() * sizeof info[0]),
        tokens(DType::F32, rows), last(DType::F32, rows);
    const int vocab = int(logits.shape(1));
    const DeviceArray parts(DType::U8, size_t(rows) * cuda::sample_pieces(vocab) * sizeof(cuda::SamplePart));
    cuda::sample(values.as<float>(), vocab, parameters.as<cuda::SampleInfo>(), rows, tokens.as<int>(),
                 last.as<int>(), parts.as<cuda::SamplePart>(), nullptr);
    std::vector<int> result(rows);
    tokens.read_bytes(reinterpret_cast<uint8_t*>(result.data()));
    return result;
}

// logits [B, V] with the edits of each row that has some: (row, repetition, presence, frequency, edits, bans,
// allowed, last_unknown); `last` [B]: the rows' last samples.
using RowEdits = std::tuple<int, float, float, float, std::vector<EditFields>,
                            std::vector<std::pair<int, int>>, std::vector<int>, bool>;
Floats edit_logits(const Floats& logits, const std::vector<RowEdits>& rows, const std::vector<int>& last) {
    const int count = int(logits.shape(0)), vocab = int(logits.shape(1));
    BatchData batch;
    batch.slices.resize(count);
    std::vector<int> sampled(count);
    for (int r = 0; r < count; ++r) batch.slices[r].slot = sampled[r] = r;
    for (const auto& [row, repetition, presence, frequency, edits, bans, allowed, last_unknown] : rows)
        batch.slices[row].edits = std::make_shared<const LogitEdits>(
            logit_edits(repetition, presence, frequency, edits, bans, allowed, last_unknown, vocab));
    const DeviceArray values(logits, DType::F32), lasts(last.data(), last.size() * 4);
    cuda::EditInputs inputs;
    inputs.send(batch, sampled, nullptr);
    cuda::edit_logits(values.as<float>(), vocab, inputs.view(), lasts.as<int>(), nullptr);
    return values.array({count, vocab});
}

// For each row of logits [B, V]: (logprob of its token, [(id, logprob) of the `count` likeliest]).
std::vector<std::pair<float, std::vector<std::pair<int, float>>>> logprobs(const Floats& logits,
                                                                           const std::vector<int>& tokens,
                                                                           int count) {
    require(count <= kMostLogprobs, "count is too large");
    const int rows = int(logits.shape(0)), vocab = int(logits.shape(1));
    const DeviceArray values(logits, DType::F32), chosen(tokens.data(), tokens.size() * 4),
        out(DType::U8, size_t(rows) * sizeof(cuda::LogprobRow));
    cuda::logprobs(values.as<float>(), vocab, nullptr, count, chosen.as<int>(), rows,
                   out.as<cuda::LogprobRow>(), nullptr);
    std::vector<cuda::LogprobRow> found(rows);
    out.read_bytes(reinterpret_cast<uint8_t*>(found.data()));
    std::vector<std::pair<float, std::vector<std::pair<int, float>>>> result(rows);
    for (int r = 0; r < rows; ++r) {
        result[r].first = found[r].logprob;
        for (int i = 0; i < found[r].count; ++i)
            result[r].second.emplace_back(found[r].ids[i], found[r].values[i]);
    }
    return result;
}

}  // namespace

void register_kernels_cuda_sampling(py::module_& m) {
    m.def("sample", &sample, py::arg("logits"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
          py::arg("seed"), py::arg("position"), py::arg("min_p") = 0.f);
    m.def("edit_logits", &edit_logits, py::arg("logits"), py::arg("rows"), py::arg("last"));
    m.def("logprobs", &logprobs, py::arg("logits"), py::arg("tokens"), py::arg("count"));
}

}  // namespace turbomill::python

#endif
