// Configuration structs. Each field is declared once, in an X-macro; the Python binding reflects the same
// list.
#pragma once

#include <string>

namespace turbomill {

#define TM_DECLARE_FIELD(type, name, value) type name = value;

// X(type, name, default)
#define TM_MODEL_FIELDS(X)               \
    X(int, vocab_size, 0)                \
    X(int, hidden_size, 0)               \
    X(int, num_layers, 0)                \
    X(int, num_heads, 0)                 \
    X(int, num_kv_heads, 0)              \
    X(int, head_dim, 0)                  \
    X(int, intermediate_size, 0)         \
    X(float, norm_eps, 1e-5f)            \
    X(float, rope_attention_factor, 1.f) \
    X(bool, tie_word_embeddings, false)

struct ModelConfig {
    TM_MODEL_FIELDS(TM_DECLARE_FIELD)

    int group() const { return num_heads / num_kv_heads; }  // query heads per KV head
    int qkv_dim() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    int q_dim() const { return num_heads * head_dim; }
    // Throws std::invalid_argument that names the field.
    void validate() const;
};

#define TM_ENGINE_FIELDS(X)            \
    X(std::string, device, "cpu")      \
    X(int, num_threads, 0)             \
    X(int, max_batch_size, 64)         \
    X(int, session_len, 2048)          \
    X(int, max_prefill_token_num, 512) \
    X(int, block_len, 64)              \
    X(int, cache_block_count, 0)       \
    X(int, quant_policy, 0)            \
    X(std::string, cache_dtype, "float16")

struct EngineConfig {
    TM_ENGINE_FIELDS(TM_DECLARE_FIELD)

    // The most tokens one step can hold: a full batch of decodes beside the prefill budget.
    int max_step_tokens() const { return max_prefill_token_num + max_batch_size; }
    void validate() const;
};

#undef TM_DECLARE_FIELD

}  // namespace turbomill
