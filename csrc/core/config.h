// Configuration structs. Each field is declared once, in an X-macro; the Python binding reflects the same
// list.
#pragma once

#include <string>
#include <vector>

namespace turbomill {

#define TM_DECLARE_FIELD(type, name, value) type name = value;

// X(type, name, default): what every decoder has.
#define TM_MODEL_SIZES(X)                \
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

// What sets a model apart from Llama. Every default means "as Llama does it": a backend that does not know a
// field refuses the models that set it (require_known_variants).
//   rotary_dim               leading dimensions of a head that RoPE rotates; 0: all
//   rope_original_context    sessions longer than this use the table rope_long instead of rope; 0: never
//   local_rope_layers        layers that use the table rope_local
//   qk_norm                  RMSNorm of each query and key head before RoPE
//   post_norms               RMSNorm of what attention and MLP add to the residual
//   embedding_scale          embeddings are multiplied by it
//   attention_scale          of q . k; 0: head_dim ** -0.5
//   attention_softcap        scores s become cap * tanh(s / cap); 0: off
//   logit_softcap            likewise for the logits
//   activation               of the gate: silu, gelu_tanh
//   layer_windows            [L] keys that a query of a layer sees, itself included, 0: all; empty: all zeros
//   num_experts ...          mixture of experts in place of the MLP, but for the layers dense_layers
//   norm_topk_prob           the weights of a token's experts are made to sum to one
//   shared_expert_intermediate_size  0: no expert that every token uses, weighted by a sigmoid
#define TM_MODEL_VARIANTS(X)                   \
    X(int, rotary_dim, 0)                      \
    X(int, rope_original_context, 0)           \
    X(std::vector<int>, local_rope_layers, {}) \
    X(bool, qk_norm, false)                    \
    X(bool, post_norms, false)                 \
    X(float, embedding_scale, 1.f)             \
    X(float, attention_scale, 0.f)             \
    X(float, attention_softcap, 0.f)           \
    X(float, logit_softcap, 0.f)               \
    X(std::string, activation, "silu")         \
    X(std::vector<int>, layer_windows, {})     \
    X(int, num_experts, 0)                     \
    X(int, experts_per_token, 0)               \
    X(int, expert_intermediate_size, 0)        \
    X(int, shared_expert_intermediate_size, 0) \
    X(bool, norm_topk_prob, false)             \
    X(std::vector<int>, dense_layers, {})

#define TM_MODEL_FIELDS(X) \
    TM_MODEL_SIZES(X)      \
    TM_MODEL_VARIANTS(X)

struct ModelConfig {
    TM_MODEL_FIELDS(TM_DECLARE_FIELD)

    int group() const { return num_heads / num_kv_heads; }  // query heads per KV head
    int qkv_dim() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    int q_dim() const { return num_heads * head_dim; }
    int rotary() const { return rotary_dim ? rotary_dim : head_dim; }
    int window(int layer) const { return layer_windows.empty() ? 0 : layer_windows[layer]; }
    bool local_rope(int layer) const;
    bool sparse(int layer) const;  // experts in place of the MLP
    float score_scale() const;     // of q . k
    // Names of the variant fields that are not at Llama's value.
    std::vector<std::string> variants() const;
    // Throws std::invalid_argument that names the field.
    void validate() const;
};

// Throws std::invalid_argument naming the variants of `model` that are not among `known`.
void require_known_variants(const ModelConfig& model, const std::string& backend,
                            const std::vector<std::string>& known);

// The KV cache's scheme:
//   quant_policy     0: rows in cache_dtype; 8, 4: integers; 84: K in 8 bits, V in 4; 16, 17: fp8 e4m3, e5m2
//   kv_rotation      K and V are rotated before they are stored (kernels/cache_layout.h)
//   kv_16bit_layers  layers that keep cache_dtype whatever the policy
#define TM_ENGINE_FIELDS(X)                  \
    X(std::string, device, "cpu")            \
    X(int, num_threads, 0)                   \
    X(int, max_batch_size, 64)               \
    X(int, session_len, 2048)                \
    X(int, max_prefill_token_num, 512)       \
    X(int, block_len, 64)                    \
    X(int, cache_block_count, 0)             \
    X(int, quant_policy, 0)                  \
    X(bool, kv_rotation, false)              \
    X(std::vector<int>, kv_16bit_layers, {}) \
    X(std::string, cache_dtype, "float16")   \
    X(int, activation_bits, 32)              \
    X(bool, deterministic, false)            \
    X(bool, eager_mode, false)               \
    X(bool, enable_prefix_caching, true)

struct EngineConfig {
    TM_ENGINE_FIELDS(TM_DECLARE_FIELD)

    bool keeps_16bit(int layer) const;
    // The most tokens one step can hold: a full batch of decodes beside the prefill budget.
    int max_step_tokens() const { return max_prefill_token_num + max_batch_size; }
    void validate() const;
    // What needs the model's sizes, too.
    void validate(const ModelConfig& model) const;
};

#undef TM_DECLARE_FIELD

}  // namespace turbomill
