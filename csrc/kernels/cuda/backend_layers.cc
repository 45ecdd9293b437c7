// What the decoder asks of each layer, as launches on the backend's stream.
#include <algorithm>

#include "kernels/cuda/attention_choice.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/error.h"
#include "kernels/key_centres.h"

namespace turbomill::cuda {

void CudaBackend::embed(Buffer& x) {
    auto* target = static_cast<float*>(x.data());
    if (embedding_.w8.codes)
        embed_w8(embedding_.w8, step_.ids(), last_token_.as<int>(), model_.embedding_scale, target,
                 step_.tokens, stream_);
    else
        cuda::embed(type_, embedding_.dense, step_.ids(), last_token_.as<int>(), model_.embedding_scale,
                    target, step_.tokens, model_.hidden_size, stream_);
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
    const RopeArgs args{qkv.data(),
                        table.cos.as<float>(),
                        table.sin.as<float>(),
                        table.half,
                        step_.positions(),
                        step_.row_slice(),
                        step_.slices(),
                        step_.blocks(),
                        step_.tokens,
                        model_.num_heads,
                        q_norm_,
                        k_norm_,
                        model_.norm_eps};
    const CacheView& cache = caches_[layer];
    if (centring_ && cache.rotated)
        add_keys(type_, args, cache, centres_.as<float>() + size_t(layer) * cache.heads * cache.head_dim,
                 stream_);
    if (centring_ && layer == 0) centred_tokens_ += step_.tokens;
    cuda::rope_and_cache(type_, args, cache, stream_);
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
            attention_any(type_, args, caches_[layer], stream_);
        else
            attention_tensor(type_, args, parts(), kQueryRows, caches_[layer], stream_);
    }
    if (prompt_tiles_.rows) {
        prompt_attention(layer, qkv, out);
    } else if (step_.prompt_tiles) {
        attention_tensor(type_, attention_args(layer, qkv, out, step_.prompts(), step_.prompt_tiles), parts(),
                         kPromptRows, caches_[layer], stream_);
    }
    if (caches_[layer].rotated && !rotates_inside(layer))
        rotate_outputs(type_, out.data(), step_.tokens, model_.num_heads, model_.head_dim, stream_);
}

bool CudaBackend::rotates_inside(int layer) const {
    return attention_kernels_ == AttentionKernels::Decode && step_.prompt_tiles == 0 &&
           attention_decode_rotates(caches_[layer]);
}

void CudaBackend::begin_centring() {
    const size_t count = size_t(model_.num_layers) * model_.num_kv_heads * model_.head_dim;
    centres_ = DeviceMemory(count * 4, "the keys' centres", "use --no-kv-rotation");
    check(cudaMemsetAsync(centres_.as(), 0, centres_.bytes(), stream_), "clearing the keys' centres");
    for (CacheView& cache : caches_) cache.centre = nullptr;
    centring_ = true;
    centred_tokens_ = 0;
}

void CudaBackend::end_centring() {
    centring_ = false;
    const int width = model_.num_kv_heads * model_.head_dim;
    std::vector<float> means(centres_.bytes() / 4);
    check(cudaMemcpyAsync(means.data(), centres_.as(), centres_.bytes(), cudaMemcpyDeviceToHost, stream_),
          "reading the keys' sums");
    check(cudaStreamSynchronize(stream_), "reading the keys' sums");
    for (float& v : means) v /= float(std::max(centred_tokens_, 1));
    KeyCentres centres(model_);
    centres.begin();
    for (int i = 0; i < model_.num_layers; ++i) centres.add(i, means.data() + size_t(i) * width, 1, width);
    centres.end(rope_.mean(stream_), local_rope_.mean(stream_));
    for (int i = 0; i < model_.num_layers; ++i) {
        float* centre = centres_.as<float>() + size_t(i) * width;
        check(cudaMemcpyAsync(centre, centres.of(i), size_t(width) * 4, cudaMemcpyHostToDevice, stream_),
              "copying the keys' centres");
        caches_[i].centre = caches_[i].rotated ? centre : nullptr;
    }
    check(cudaStreamSynchronize(stream_), "copying the keys' centres");
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
    cuda::attention_decode(
        type_,
        {qkv.data(), out.data(), work.ranges, work.entries, step_.blocks(), work.range_count,
         step_.decode_entries, step_.decode_rows, model_.num_heads,
         rope_fused_ ? table.cos.as<float>() : nullptr, rope_fused_ ? table.sin.as<float>() : nullptr, scores,
         caches_[layer].rotated && rotates_inside(layer)},
        parts(), caches_[layer], stream_);
}

void CudaBackend::prompt_attention(int layer, Buffer& qkv, Buffer& out) {
    const bool unpacks = caches_[layer].quantized();
    int first = 0;
    for (const int end : step_.prompt_launches()) {
        const AttentionArgs args = attention_args(layer, qkv, out, step_.prompts() + first, end - first);
        if (unpacks)
            kv_unpack(type_,
                      {args.slices, args.blocks, args.tiles, args.tile_count, args.scores.window, unpacked_},
                      caches_[layer], stream_);
        attention_prompt(type_, args, unpacks ? unpacked_ : caches_[layer], unpacks, step_.tokens,
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
