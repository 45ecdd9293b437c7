// What the GPU's timers share: random data that the L2 cache cannot hold, and medians of graph replays.
#pragma once

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "core/half.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/memory.h"

namespace turbomill::python {

inline constexpr size_t kColdBytes = size_t(240) << 20;  // several times any GPU's L2
inline constexpr size_t kPattern = size_t(1) << 21;  // random elements that fill larger arrays by repetition

inline std::vector<uint16_t> random_halves(size_t count, DType type, float low, float high) {
    std::mt19937 generator(7);
    std::uniform_real_distribution<float> uniform(low, high);
    std::vector<uint16_t> bits(count);
    for (auto& b : bits)
        b = type == DType::F16 ? float_to_f16(uniform(generator)) : float_to_bf16(uniform(generator));
    return bits;
}

// Fills device memory with repetitions of `pattern`.
template <class T>
void fill(const cuda::DeviceMemory& memory, const std::vector<T>& pattern) {
    const size_t bytes = std::min(pattern.size() * sizeof(T), memory.bytes());
    cuda::check(cudaMemcpy(memory.as(), pattern.data(), bytes, cudaMemcpyHostToDevice), "filling");
    for (size_t at = bytes; at < memory.bytes(); at += bytes)
        cuda::check(cudaMemcpy(memory.as<uint8_t>() + at, memory.as(), std::min(bytes, memory.bytes() - at),
                               cudaMemcpyDeviceToDevice),
                    "filling");
}

inline cuda::DeviceMemory random_memory(size_t bytes, const std::vector<uint16_t>& pattern) {
    cuda::DeviceMemory memory(bytes, "a benchmark's data", "use a smaller case");
    fill(memory, pattern);
    return memory;
}

// Median microseconds of `launches` calls recorded in one graph, per call.
inline double time_graph(cudaStream_t stream, int launches, int repeats,
                         const std::function<void(int)>& call) {
    for (int i = 0; i < std::min(launches, 2); ++i) call(i);  // algorithms are chosen outside the capture
    cuda::check(cudaStreamSynchronize(stream), "warming up");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < launches; ++i) call(i);
    cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
    cuda::check(cudaGraphInstantiate(&exec, graph, 0), "graph");
    cudaEvent_t begin = nullptr, end = nullptr;
    cuda::check(cudaEventCreate(&begin), "event");
    cuda::check(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = 0; i < repeats + 2; ++i) {
        cuda::check(cudaEventRecord(begin, stream), "event");
        cuda::check(cudaGraphLaunch(exec, stream), "replay");
        cuda::check(cudaEventRecord(end, stream), "event");
        cuda::check(cudaEventSynchronize(end), "replay");
        float milliseconds = 0;
        cuda::check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
        if (i >= 2) times.push_back(milliseconds);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return double(times[times.size() / 2]) * 1000 / launches;
}

}  // namespace turbomill::python
