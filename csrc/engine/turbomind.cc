#include "engine/turbomind.h"

#include <algorithm>
#include <utility>

#include "core/types.h"
#include "kernels/cache_layout.h"
#include "kernels/make_backend.h"

namespace turbomill {
namespace {

const ModelConfig& checked(const ModelConfig& model) {
    model.validate();
    return model;
}

const EngineConfig& checked(const EngineConfig& config, const ModelConfig& model) {
    config.validate(model);
    return config;
}

// A backend has computed angles from them.
void require_same_tables(const Weights& a, const Weights& b) {
    if (a.rope_inv_freq != b.rope_inv_freq || a.rope_long_inv_freq != b.rope_long_inv_freq ||
        a.rope_local_inv_freq != b.rope_local_inv_freq)
        throw std::runtime_error("rope.inv_freq: differs from the model's that runs");
}

// Keys' means over so many tokens hardly depend on which tokens they are.
constexpr int kCentreTokens = 256;

// Runs the model over arbitrary tokens for the centres of its keys. A softcap sees where scores lie: such a
// model's keys are only rotated.
void centre_keys(const ModelConfig& model, const EngineConfig& config, Backend& backend, Decoder& decoder) {
    if (!CacheLayout(model, config).rotates() || model.attention_softcap > 0.f) return;
    // One text, in chunks as the engine's prompts: the same whatever max_prefill_token_num is.
    const int length =
        std::min({kCentreTokens, config.session_len, config.cache_block_count * config.block_len});
    uint64_t state = 1;
    backend.begin_centring();
    for (int done = 0; done < length; done += config.max_prefill_token_num) {
        BatchData batch;
        Slice& slice = batch.add_slice();
        slice.context = done;
        slice.length = std::min(config.max_prefill_token_num, length - done);
        for (int i = 0; i < slice.length; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
            slice.tokens.push_back(int((state >> 33) % uint64_t(model.vocab_size)));
        }
        for (int i = 0; i < ceil_div(done + slice.length, config.block_len); ++i) slice.blocks.push_back(i);
        decoder.issue(batch);
        decoder.complete();
    }
    backend.end_centring();
}

std::unique_ptr<Decoder> make_decoder(const ModelConfig& model, const EngineConfig& config,
                                      const Weights& weights, Backend& backend) {
    auto decoder = std::make_unique<Decoder>(model, weights, backend, config.max_step_tokens());
    centre_keys(model, config, backend, *decoder);
    return decoder;
}

}  // namespace

Turbomind::Turbomind(const ModelConfig& model, const std::vector<TensorRef>& tensors,
                     const EngineConfig& config, Engine::OnOutputs on_outputs)
    : model_(checked(model)),
      config_(checked(config, model_)),
      weights_(model_, tensors),
      backend_(make_backend(model_, config_, weights_)),
      decoder_(make_decoder(model_, config_, weights_, *backend_)),
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
    engine_->wake([this] { restore(); });
    asleep_ = false;
}

void Turbomind::update(const std::vector<TensorRef>& tensors) {
    Weights fresh(model_, tensors);
    require_same_tables(weights_, fresh);
    const std::lock_guard lock(asleep_mutex_);
    const bool paused = engine_->paused(), asleep = asleep_;
    engine_->sleep([&] {
        backend_->sleep(2);
        weights_ = std::move(fresh);
        other_weights_ = true;
    });
    asleep_ = true;
    if (asleep) return;
    engine_->wake([this] { restore(); }, paused);  // where that fails, wake() may be tried again
    asleep_ = false;
}

void Turbomind::restore() {
    backend_->wake();
    if (other_weights_) centre_keys(model_, config_, *backend_, *decoder_);
    other_weights_ = false;
}

void Turbomind::close() {
    engine_->close();
    std::call_once(freed_, [this] {
        decoder_.reset();
        backend_.reset();
    });
}

size_t cache_block_bytes(const ModelConfig& model, const EngineConfig& config) {
    return CacheLayout(checked(model), checked(config, model)).block_bytes;
}

}  // namespace turbomill
