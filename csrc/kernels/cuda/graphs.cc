#include "kernels/cuda/graphs.h"

#include <algorithm>

#include "core/types.h"
#include "kernels/cuda/error.h"

namespace turbomill::cuda {
namespace {

cudaGraphExec_t record(const std::function<void()>& calls, cudaStream_t stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a step");
    cudaGraph_t graph = nullptr;
    try {
        calls();
    } catch (...) {
        cudaStreamEndCapture(stream, &graph);  // the stream must not stay in capture
        if (graph) cudaGraphDestroy(graph);
        cudaGetLastError();
        throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "recording a step");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "preparing a recorded step");
    return exec;
}

}  // namespace

int padded_rows(int count, int max_batch_size) {
    const int step = count <= 64 ? 8 : 16;
    int rows = ceil_div(count, step) * step;
    for (int small = 1; small < 8; small *= 2)
        if (count <= small) return std::min(small, max_batch_size);
    return std::min(rows, std::max(count, max_batch_size));
}

StepGraphs::~StepGraphs() {
    clear();
}

void StepGraphs::clear() {
    for (const auto& [rows, exec] : recorded_)
        if (exec) cudaGraphExecDestroy(exec);
    recorded_.clear();
}

bool StepGraphs::run(int rows, const std::function<void()>& calls, cudaStream_t stream) {
    const auto [place, first] = recorded_.try_emplace(rows, nullptr);
    if (first) {
        calls();
        return false;
    }
    if (!place->second) place->second = record(calls, stream);
    check(cudaGraphLaunch(place->second, stream), "running a recorded step");
    return true;
}

}  // namespace turbomill::cuda
