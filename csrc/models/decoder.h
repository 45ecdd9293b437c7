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

    // Starts a step; the batch stays where it is until complete(). At most two steps at a time. Throws on
    // failure.
    void issue(BatchData& batch);
    // Whether the oldest step is done.
    bool ready() { return backend_.ready(); }
    // Waits for the oldest step, which fills its batch's samples and logits. Throws on failure.
    void complete() { backend_.synchronize(); }

  private:
    void queue(BatchData& batch);

    const bool gelu_;
    const Weights& weights_;
    Backend& backend_;
    // residual [T, H], normed [T, H], qkv [T, (Nq+2Nkv)D], attention [T, NqD], delta [T, H], gate_up [T, 2I],
    // hidden [T, I]
    std::unique_ptr<Buffer> residual_, normed_, qkv_, attention_, delta_, gate_up_, hidden_;
};

}  // namespace turbomill
