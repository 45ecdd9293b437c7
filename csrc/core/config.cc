#include "core/config.h"

#include <stdexcept>

namespace turbomill {
namespace {

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

}  // namespace

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
}

void EngineConfig::validate() const {
    require(num_threads >= 0, "num_threads must not be negative");
    require(max_batch_size > 0, "max_batch_size must be positive");
    require(session_len > 0, "session_len must be positive");
    require(max_prefill_token_num > 0, "max_prefill_token_num must be positive");
    require(block_len > 0 && block_len % 8 == 0, "block_len must be a positive multiple of 8");
    require(cache_block_count > 0, "cache_block_count must be positive");
    require(quant_policy == 0 || quant_policy == 8 || quant_policy == 4,
            "quant_policy is " + std::to_string(quant_policy) + ", expected 0, 8 or 4");
    require(cache_dtype == "float32" || cache_dtype == "float16" || cache_dtype == "bfloat16",
            "cache_dtype is '" + cache_dtype + "', expected float32, float16 or bfloat16");
}

}  // namespace turbomill
