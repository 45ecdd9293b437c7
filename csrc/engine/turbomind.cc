#include "engine/turbomind.h"

#include <utility>

#include "kernels/cache_layout.h"
#include "kernels/make_backend.h"

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
      backend_(make_backend(model_, config_, weights_)),
      decoder_(std::make_unique<Decoder>(model_, weights_, *backend_, config_.max_step_tokens())),
      engine_(std::make_unique<Engine>(
          model_, config_,
          StepRunner{[this](BatchData& batch) { decoder_->issue(batch); },
                     [this] { return decoder_->ready(); }, [this] { decoder_->complete(); }},
          std::move(on_outputs))) {}

void Turbomind::sleep(int level) {
    if (level != 1 && level != 2)
        throw std::invalid_argument("the level of sleep is " + std::to_string(level) + ", expected 1 or 2");
    engine_->sleep([this, level] { backend_->sleep(level); });
}

void Turbomind::wake() {
    engine_->wake([this] { backend_->wake(); });
}

void Turbomind::close() {
    engine_->close();
    std::call_once(freed_, [this] {
        decoder_.reset();
        backend_.reset();
    });
}

size_t cache_block_bytes(const ModelConfig& model, const EngineConfig& config) {
    return CacheLayout(checked(model), config).block_bytes;
}

}  // namespace turbomill
