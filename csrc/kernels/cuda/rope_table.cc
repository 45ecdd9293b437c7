#include "kernels/cuda/rope_table.h"

#include <cmath>

#include "kernels/cuda/error.h"

namespace turbomill::cuda {

RopeTable::RopeTable(const std::vector<float>& inv_freq, int positions, float factor, cudaStream_t stream)
    : half(int(inv_freq.size())),
      cos(size_t(half) * positions * 4, "the rotary table", "lower session_len"),
      sin(cos.bytes(), "the rotary table", "lower session_len") {
    std::vector<float> cosines(size_t(half) * positions), sines(cosines.size());
    for (int position = 0; position < positions; ++position) {
        for (int i = 0; i < half; ++i) {
            // fp32 products, as the models were trained and as transformers computes them
            const float angle = float(position) * inv_freq[i];
            cosines[size_t(position) * half + i] = std::cos(angle) * factor;
            sines[size_t(position) * half + i] = std::sin(angle) * factor;
        }
    }
    if (cosines.empty()) return;
    const auto copy = [&](const DeviceMemory& to, const std::vector<float>& from) {
        check(cudaMemcpyAsync(to.as(), from.data(), to.bytes(), cudaMemcpyHostToDevice, stream),
              "copying the rotary table");
    };
    copy(cos, cosines);
    copy(sin, sines);
    check(cudaStreamSynchronize(stream), "copying the rotary table");
}

MeanRotation RopeTable::mean(cudaStream_t stream) const {
    std::vector<float> cosines(cos.bytes() / 4), sines(sin.bytes() / 4);
    const auto copy = [&](std::vector<float>& to, const DeviceMemory& from) {
        if (to.empty()) return;
        check(cudaMemcpyAsync(to.data(), from.as(), from.bytes(), cudaMemcpyDeviceToHost, stream),
              "reading the rotary table");
    };
    copy(cosines, cos);
    copy(sines, sin);
    check(cudaStreamSynchronize(stream), "reading the rotary table");
    return {cosines, sines, half};
}

}  // namespace turbomill::cuda
