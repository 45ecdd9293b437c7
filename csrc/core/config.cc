#include "core/config.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/kv_scheme.h"

namespace turbomill {
namespace {

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

bool contains(const std::vector<int>& values, int value) {
    return std::find(values.begin(), values.end(), value) != values.end();
}

void require_layers(const std::vector<int>& layers, int count, const std::string& name) {
    for (const int layer : layers)
        require(layer >= 0 && layer < count,
                name + " names layer " + std::to_string(layer) + ", the model has " + std::to_string(count));
}

}  // namespace

bool ModelConfig::local_rope(int layer) const {
    return contains(local_rope_layers, layer);
}

bool ModelConfig::sparse(int layer) const {
    return num_experts > 0 && !contains(dense_layers, layer);
}

float ModelConfig::score_scale() const {
    return attention_scale > 0.f ? attention_scale : 1.f / std::sqrt(float(head_dim));
}

std::vector<std::string> ModelConfig::variants() const {
    const ModelConfig llama;
    std::vector<std::string> names;
#define TM_VARIANT(type, name, value) \
    if (name != llama.name) names.push_back(#name);
    TM_MODEL_VARIANTS(TM_VARIANT)
#undef TM_VARIANT
    return names;
}

void require_known_variants(const ModelConfig& model, const std::string& backend,
                            const std::vector<std::string>& known) {
    std::string unknown;
    for (const auto& name : model.variants())
        if (std::find(known.begin(), known.end(), name) == known.end())
            unknown += (unknown.empty() ? "" : ", ") + name;
    require(unknown.empty(), "the " + backend + " backend does not support this model's " + unknown);
}

void ModelConfig::validate() const {
    const auto positive = [](int value, const char* name) {
        require(value > 0,
                std::string(name) + " is " + std::to_string(value) + ", expected a positive number");
    };
    positive(vocab_size, "vocab_size");
    positive(hidden_size, "hidden_size");
    positive(num_layers, "num_layers");
    positive(num_heads, "num_heads");
    positive(num_kv_heads, "num_kv_heads");
    positive(head_dim, "head_dim");
    positive(intermediate_size, "intermediate_size");
    require(num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
    require(head_dim % 2 == 0, "head_dim must be even");
    require(intermediate_size % 8 == 0,
            "intermediate_size must be a multiple of 8 (gate and up interleave by 8)");
    require(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
            "rotary_dim must be even and at most head_dim");
    require(rope_original_context >= 0, "rope_original_context must not be negative");
    require(embedding_scale > 0.f, "embedding_scale must be positive");
    require(attention_scale >= 0.f && attention_softcap >= 0.f && logit_softcap >= 0.f,
            "attention_scale, attention_softcap and logit_softcap must not be negative");
    require(activation == "silu" || activation == "gelu_tanh",
            "activation is '" + activation + "', expected silu or gelu_tanh");
    require(layer_windows.empty() || int(layer_windows.size()) == num_layers,
            "layer_windows has " + std::to_string(layer_windows.size()) + " entries, expected one per layer");
    for (const int window : layer_windows) require(window >= 0, "layer_windows must not be negative");
    require_layers(local_rope_layers, num_layers, "local_rope_layers");
    require_layers(dense_layers, num_layers, "dense_layers");
    if (num_experts == 0) return;
    positive(num_experts, "num_experts");
    positive(expert_intermediate_size, "expert_intermediate_size");
    require(experts_per_token > 0 && experts_per_token <= num_experts,
            "experts_per_token must be between 1 and num_experts");
    require(shared_expert_intermediate_size >= 0 && shared_expert_intermediate_size % 8 == 0 &&
                expert_intermediate_size % 8 == 0,
            "expert_intermediate_size and shared_expert_intermediate_size must be multiples of 8");
    require(activation == "silu", "experts need the activation silu");
}

void EngineConfig::validate() const {
    require(activation_bits == 8 || activation_bits == 16 || activation_bits == 32,
            "activation_bits is " + std::to_string(activation_bits) + ", expected 8, 16 or 32");
    require(num_threads >= 0, "num_threads must not be negative");
    require(max_batch_size > 0, "max_batch_size must be positive");
    require(session_len > 0, "session_len must be positive");
    require(max_prefill_token_num > 0, "max_prefill_token_num must be positive");
    require(block_len > 0 && block_len % 8 == 0, "block_len must be a positive multiple of 8");
    require(cache_block_count > 0, "cache_block_count must be positive");
    require(is_kv_policy(quant_policy), "quant_policy is " + std::to_string(quant_policy) +
                                            ", expected 0, 8, 4, 84 (K in 8 bits, V in 4), 16 or 17 (fp8)");
    require(cache_dtype == "float32" || cache_dtype == "float16" || cache_dtype == "bfloat16",
            "cache_dtype is '" + cache_dtype + "', expected float32, float16 or bfloat16");
}

void EngineConfig::validate(const ModelConfig& model) const {
    validate();
    require_layers(kv_16bit_layers, model.num_layers, "kv_16bit_layers");
}

bool EngineConfig::keeps_16bit(int layer) const {
    return contains(kv_16bit_layers, layer);
}

}  // namespace turbomill
