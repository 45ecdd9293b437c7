// A mixture of experts on the GPU: route, sort the pairs of token and expert, run each expert on its rows,
// add back. Every size that depends on the routing stays on the device, so that steps can be recorded.
#pragma once

#include "kernels/cuda/device_weights.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/moe_launch.h"

namespace turbomill::cuda {

class MoeRunner {
  public:
    // Takes workspaces for steps of up to `tokens` tokens; none for a model without experts. Throws
    // std::invalid_argument for a gate of the shared expert that is quantized.
    MoeRunner(const ModelConfig& model, const Weights& weights, int tokens, DType type, int multiprocessors,
              cudaStream_t stream);

    // y [rows, H] = the weighted sum of each row's experts for x [rows, H]; x and y differ
    void operator()(const Moe& moe, const DeviceWeights& weights, LinearRunner& linear, const void* x,
                    int rows, void* y);

  private:
    // y [pairs, N] = x [pairs, K] w[e]^T; or, with `gated`, the gate of that product, [pairs, N/2].
    void experts(const DeviceLinear& w, const void* x, const ExpertRows& rows, void* y, bool gated);
    const void* shared_expert(const Moe& moe, const DeviceWeights& weights, LinearRunner& linear,
                              const void* x, int rows);

    const ModelConfig& model_;
    const DType type_;
    const int multiprocessors_;
    cudaStream_t stream_;
    DeviceMemory logits_;                          // [T, E] fp32
    DeviceMemory chosen_, weights_;                // [T, top]
    DeviceMemory offsets_, pairs_, places_;        // [E + 1], [T top], [T top]
    DeviceMemory sorted_;                          // [T top, H]: inputs, then outputs
    DeviceMemory gate_up_, hidden_;                // [T top, 2 Ie], [T top, Ie]
    DeviceMemory shared_gate_;                     // [T] fp32
    DeviceMemory shared_gate_up_, shared_hidden_;  // [T, 2 Is], [T, Is]
    DeviceMemory shared_out_;                      // [T, H]
};

}  // namespace turbomill::cuda
