#include "models/decoder.h"

namespace turbomill {

Decoder::Decoder(const ModelConfig& c, const Weights& weights, Backend& backend, int max_tokens)
    : gelu_(c.activation == "gelu_tanh"),
      weights_(weights),
      backend_(backend),
      residual_(backend.allocate_residual(max_tokens, c.hidden_size)),
      normed_(backend.allocate(max_tokens, c.hidden_size)),
      qkv_(backend.allocate(max_tokens, c.qkv_dim())),
      attention_(backend.allocate(max_tokens, c.q_dim())),
      delta_(backend.allocate(max_tokens, c.hidden_size)),
      gate_up_(backend.allocate(max_tokens, 2 * c.intermediate_size)),
      hidden_(backend.allocate(max_tokens, c.intermediate_size)) {
    backend_.set_embedding(weights.embedding);
}

void Decoder::issue(BatchData& batch) {
    backend_.begin_step(batch);
    if (!batch.copies.empty()) backend_.copy_blocks(batch.copies);
    backend_.run(batch, [&] { queue(batch); });
}

void Decoder::queue(BatchData& batch) {
    Backend& b = backend_;
    b.embed(*residual_);
    for (int i = 0; i < int(weights_.layers.size()); ++i) {
        const DecoderLayer& layer = weights_.layers[i];
        if (i == 0) {
            b.rms_norm(*residual_, layer.attention_norm, *normed_);
        } else {
            b.add_rms_norm(*delta_, *residual_, layer.attention_norm, *normed_);
        }
        b.linear(layer.qkv, *normed_, *qkv_);
        if (!layer.q_norm.empty()) b.qk_norm(layer.q_norm, layer.k_norm, *qkv_);
        b.rope_and_cache(i, *qkv_);
        b.attention(i, *qkv_, *attention_);
        b.linear(layer.o, *attention_, *delta_);
        if (!layer.post_attention_norm.empty()) b.rms_norm(*delta_, layer.post_attention_norm, *delta_);
        b.add_rms_norm(*delta_, *residual_, layer.ffn_norm, *normed_);
        if (layer.moe) {
            b.moe(*layer.moe, *normed_, *delta_);
        } else {
            if (gelu_) {
                b.linear(layer.gate_up, *normed_, *gate_up_);
                b.gelu_gate(*gate_up_, *hidden_);
            } else {
                b.silu_gated_linear(layer.gate_up, *normed_, *gate_up_, *hidden_);
            }
            b.linear(layer.down, *hidden_, *delta_);
        }
        if (!layer.post_ffn_norm.empty()) b.rms_norm(*delta_, layer.post_ffn_norm, *delta_);
    }
    b.finish(*delta_, *residual_, weights_.norm, weights_.output, batch);
}

}  // namespace turbomill
