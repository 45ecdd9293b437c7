#include "engine/turbomind.h"

#include <utility>

#include "kernels/cpu/backend.h"

namespace turbomill {
namespace {

template <class Config>
const Config& checked(const Config& config) {
    config.validate();
    return config;
}

}  // namespace

Turbomind::Turbomind(const ModelConfig& model, const std::vector<TensorRef>& tensors,
                     const EngineConfig& config, Engine::OnOutputs on_outputs)
    : model_(checked(model)),
      config_(checked(config)),
      weights_(model_, tensors),
      backend_(std::make_unique<cpu::CpuBackend>(
          model_, config_, weights_.inv_freq(model_, config_.session_len), weights_.rope_local_inv_freq)),
      decoder_(model_, weights_, *backend_, config_.max_step_tokens()),
      engine_(std::make_unique<Engine>(
          model_, config_, [this](BatchData& batch) { decoder_.forward(batch); }, std::move(on_outputs))) {}

size_t cache_block_bytes(const ModelConfig& model, const EngineConfig& config) {
    return cpu::CacheLayout(checked(model), config).block_bytes;
}

}  // namespace turbomill
