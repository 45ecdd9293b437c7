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

// A backend has computed angles from them.
void require_same_tables(const Weights& a, const Weights& b) {
    if (a.rope_inv_freq != b.rope_inv_freq || a.rope_long_inv_freq != b.rope_long_inv_freq ||
        a.rope_local_inv_freq != b.rope_local_inv_freq)
        throw std::runtime_error("rope.inv_freq: differs from the model's that runs");
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
    const std::lock_guard lock(asleep_mutex_);
    engine_->sleep([this, level] { backend_->sleep(level); });
    asleep_ = true;
}

void Turbomind::wake() {
    const std::lock_guard lock(asleep_mutex_);
    engine_->wake([this] { backend_->wake(); });
    asleep_ = false;
}

void Turbomind::update(const std::vector<TensorRef>& tensors) {
    Weights fresh(model_, tensors);
    require_same_tables(weights_, fresh);
    const std::lock_guard lock(asleep_mutex_);
    const bool paused = engine_->paused();
    engine_->sleep([&] {
        backend_->sleep(2);
        weights_ = std::move(fresh);
    });
    if (!asleep_) engine_->wake([this] { backend_->wake(); }, paused);
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
