// A whole engine over a store: weights, backend, decoder and orchestration, built and torn down in order.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "kernels/backend.h"
#include "models/decoder.h"
#include "store/weights.h"

namespace turbomill {

class Turbomind {
  public:
    // Throws std::invalid_argument (configuration) or std::runtime_error (weights, memory).
    Turbomind(const ModelConfig& model, const std::vector<TensorRef>& tensors, const EngineConfig& config,
              Engine::OnOutputs on_outputs);

    Engine& engine() { return *engine_; }
    // Gives the KV cache's memory back (level 1), and device copies of weights too (level 2); what runs goes
    // on after wake(). Throws std::invalid_argument for another level, std::runtime_error when waking fails.
    void sleep(int level);
    void wake();
    // Other weights, of tensors with the same names, layouts and shapes: what runs goes on with them, from
    // its tokens. An engine that sleeps, or is paused, stays so. Throws, with nothing changed,
    // std::runtime_error for a tensor that is not as it must be.
    void update(const std::vector<TensorRef>& tensors);
    // Closes the engine, then frees activations, cache and copies of weights: whoever still holds the object
    // holds little memory. Any thread, any number of times.
    void close();

  private:
    // Takes memory again; on the executor's thread.
    void restore();

    const ModelConfig model_;
    const EngineConfig config_;
    Weights weights_;
    std::unique_ptr<Backend> backend_;
    std::unique_ptr<Decoder> decoder_;
    std::unique_ptr<Engine> engine_;  // last: its threads use everything above
    std::once_flag freed_;
    std::mutex asleep_mutex_;
    bool asleep_ = false;
    bool other_weights_ = false;  // than those that the centres of the keys are of
};

// Bytes of one KV block on the backend in use.
size_t cache_block_bytes(const ModelConfig& model, const EngineConfig& config);

}  // namespace turbomill
