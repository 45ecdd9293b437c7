// A pre-norm decoder (Llama's shape and its relatives), written over the backend interface.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "store/weights.h"

namespace turbomill {

class Decoder {
  public:
    // Allocates activations for `max_tokens` rows. `weights` and `backend` outlive the decoder.
    Decoder(const ModelConfig& config, const Weights& weights, Backend& backend, int max_tokens);

    // Runs one step and fills the batch's samples and logits. Throws on failure.
    void forward(BatchData& batch);

  private:
    const bool gelu_;
    const Weights& weights_;
    Backend& backend_;
    // residual [T, H], normed [T, H], qkv [T, (Nq+2Nkv)D], attention [T, NqD], delta [T, H], gate_up [T, 2I],
    // hidden [T, I]
    std::unique_ptr<Buffer> residual_, normed_, qkv_, attention_, delta_, gate_up_, hidden_;
};

}  // namespace turbomill
