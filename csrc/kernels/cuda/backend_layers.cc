// What the decoder asks of each layer, as launches on the backend's stream.
#include "kernels/cuda/attention_choice.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/device_buffer.h"

namespace turbomill::cuda {

void CudaBackend::embed(Buffer& x) {
    cuda::embed(type_, embedding_, step_.ids(), last_token_.as<int>(), model_.embedding_scale,
                static_cast<float*>(x.data()), step_.tokens, model_.hidden_size, stream_);
}

void CudaBackend::rms_norm(Buffer& x, const std::vector<float>& weight, Buffer& y) {
    NormArgs args{};
    // What a layer adds to the residual may be normalised too: that is narrow.
    if (static_cast<DeviceBuffer&>(x).residual()) {
        args.x = static_cast<float*>(x.data());
    } else {
        args.delta = x.data();
    }
    args.weight = weights_.at(weight);
    args.y = y.data();
    args.count = step_.tokens;
    args.h = model_.hidden_size;
    args.eps = model_.norm_eps;
    cuda::rms_norm(type_, args, stream_);
}

void CudaBackend::add_rms_norm(Buffer& delta, Buffer& x, const std::vector<float>& weight, Buffer& y) {
    cuda::rms_norm(type_,
                   {static_cast<float*>(x.data()), delta.data(), nullptr, true, weights_.at(weight), y.data(),
                    step_.tokens, model_.hidden_size, model_.norm_eps},
                   stream_);
}

void CudaBackend::linear(const Linear& w, Buffer& x, Buffer& y) {
    linear_(device_view(w, weights_), x.data(), step_.tokens, y.data(), type_);
}

void CudaBackend::rope_and_cache(int layer, Buffer& qkv) {
    if (rope_fused_) return;  // attention() does it
    const RopeTable& table = rope(layer);
    cuda::rope_and_cache(type_,
                         {qkv.data(), table.cos.as<float>(), table.sin.as<float>(), table.half,
                          step_.positions(), step_.row_slice(), step_.slices(), step_.blocks(), step_.tokens,
                          model_.num_heads, q_norm_, k_norm_, model_.norm_eps},
                         cache_, layer, stream_);
    q_norm_ = k_norm_ = nullptr;
}

void CudaBackend::qk_norm(const std::vector<float>& q, const std::vector<float>& k, Buffer& /*qkv*/) {
    q_norm_ = weights_.at(q);  // rope_and_cache() does it
    k_norm_ = weights_.at(k);
}

void CudaBackend::attention(int layer, Buffer& qkv, Buffer& out) {
    if (attention_kernels_ == AttentionKernels::Decode) {
        decode_attention(layer, qkv, out);
    } else {
        const AttentionArgs args = attention_args(layer, qkv, out, step_.decodes(), step_.decode_tiles);
        if (attention_kernels_ == AttentionKernels::Any)
            attention_any(type_, args, cache_, layer, stream_);
        else
            attention_tensor(type_, args, parts(), kQueryRows, cache_, layer, stream_);
    }
    if (prompt_tiles_.rows) {
        prompt_attention(layer, qkv, out);
    } else if (step_.prompt_tiles) {
        attention_tensor(type_, attention_args(layer, qkv, out, step_.prompts(), step_.prompt_tiles), parts(),
                         kPromptRows, cache_, layer, stream_);
    }
}

AttentionArgs CudaBackend::attention_args(int layer, Buffer& qkv, Buffer& out, const QueryTile* tiles,
                                          int count) const {
    return {qkv.data(), out.data(), step_.slices(),   step_.blocks(),
            tiles,      count,      model_.num_heads, layer_scores(model_, layer)};
}

void CudaBackend::decode_attention(int layer, Buffer& qkv, Buffer& out) {
    const Scores scores = layer_scores(model_, layer);
    const auto work = step_.decode_work(scores.window);
    const RopeTable& table = rope(layer);
    cuda::attention_decode(type_,
                           {qkv.data(), out.data(), work.ranges, work.entries, step_.blocks(),
                            work.range_count, step_.decode_entries, step_.decode_rows, model_.num_heads,
                            rope_fused_ ? table.cos.as<float>() : nullptr,
                            rope_fused_ ? table.sin.as<float>() : nullptr, scores},
                           parts(), cache_, layer, stream_);
}

void CudaBackend::prompt_attention(int layer, Buffer& qkv, Buffer& out) {
    const bool unpacks = prompt_tiles_.unpacked_blocks > 0;
    int first = 0;
    for (const int end : step_.prompt_launches()) {
        const AttentionArgs args = attention_args(layer, qkv, out, step_.prompts() + first, end - first);
        if (unpacks)
            kv_unpack(type_,
                      {args.slices, args.blocks, args.tiles, args.tile_count, args.scores.window, unpacked_},
                      cache_, layer, stream_);
        attention_prompt(type_, args, unpacks ? unpacked_ : cache_, unpacks, step_.tokens, layer,
                         multiprocessors_, stream_);
        first = end;
    }
}

void CudaBackend::silu_gate(Buffer& gate_up, Buffer& out) {
    cuda::silu_gate(type_, gate_up.data(), out.data(), step_.tokens, model_.intermediate_size, stream_);
}

void CudaBackend::gelu_gate(Buffer& gate_up, Buffer& out) {
    cuda::gelu_gate(type_, gate_up.data(), out.data(), step_.tokens, model_.intermediate_size, stream_);
}

void CudaBackend::moe(const Moe& moe, Buffer& x, Buffer& y) {
    moe_(moe, weights_, linear_, x.data(), step_.tokens, y.data());
}

void CudaBackend::silu_gated_linear(const Linear& w, Buffer& x, Buffer& gate_up, Buffer& out) {
    if (!linear_.silu_gated(device_view(w, weights_), x.data(), step_.tokens, out.data()))
        Backend::silu_gated_linear(w, x, gate_up, out);
}

}  // namespace turbomill::cuda
