#include "kernels/cpu/backend.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/blas.h"
#include "store/expand.h"

namespace turbomill::cpu {
namespace {

class HostBuffer : public Buffer {
  public:
    explicit HostBuffer(size_t elements) : values_(elements) {}
    void* data() override { return values_.data(); }

  private:
    std::vector<float> values_;
};

float* floats(Buffer& buffer) {
    return static_cast<float*>(buffer.data());
}

}  // namespace

CpuBackend::RopeTable::RopeTable(const std::vector<float>& inv_freq, int positions, float factor)
    : half(int(inv_freq.size())), cos(size_t(half) * positions), sin(size_t(half) * positions) {
    for (int position = 0; position < positions; ++position) {
        for (int i = 0; i < half; ++i) {
            // fp32 products, as the models were trained and as transformers computes them
            const float angle = float(position) * inv_freq[i];
            cos[size_t(position) * half + i] = std::cos(angle) * factor;
            sin[size_t(position) * half + i] = std::sin(angle) * factor;
        }
    }
}

CpuBackend::CpuBackend(const ModelConfig& model, const EngineConfig& config,
                       const std::vector<float>& inv_freq, const std::vector<float>& local_inv_freq)
    : model_(model),
      config_(config),
      k_(kernels()),
      pool_(config.num_threads),
      cache_(model, config),
      linear_(k_, pool_, config.activation_bits, config.deterministic),
      attention_(model, k_, cache_, pool_, config.deterministic),
      moe_(model, k_, linear_, pool_),
      samplers_(pool_.size()),
      edited_(pool_.size()),
      rope_(inv_freq, config.session_len, model.rope_attention_factor),
      local_rope_(local_inv_freq, config.session_len, 1.f),
      centres_(model),
      // A sequence that just finished may still be in flight while its successor starts: twice the batch.
      last_token_(2 * config.max_batch_size, 0) {
    require_blas();
    for (int worker = 0; worker < pool_.size(); ++worker) {
        samplers_[worker].reserve(model.vocab_size);
        edited_[worker].reserve(model.vocab_size);
    }
}

std::unique_ptr<Buffer> CpuBackend::allocate(int rows, int columns) {
    return std::make_unique<HostBuffer>(size_t(rows) * columns);
}

template <class F>
void CpuBackend::for_rows(int rows, F&& fn) {
    const int step = std::max(1, rows / (4 * pool_.size()));
    pool_.run((rows + step - 1) / step, [&](int task, int) {
        for (int row = task * step; row < std::min(rows, (task + 1) * step); ++row) fn(row);
    });
}

void CpuBackend::begin_step(const BatchData& batch) {
    batch_ = &batch;
    first_.clear();
    token_ids_.clear();
    positions_.clear();
    row_slice_.clear();
    for (int i = 0; i < int(batch.slices.size()); ++i) {
        const Slice& slice = batch.slices[i];
        first_.push_back(int(token_ids_.size()));
        for (int t = 0; t < slice.length; ++t) {
            token_ids_.push_back(slice.tokens.empty() ? last_token_[slice.slot] : slice.tokens[t]);
            positions_.push_back(slice.context + t);
            row_slice_.push_back(i);
        }
    }
    tokens_ = int(token_ids_.size());
}

void CpuBackend::embed(Buffer& x) {
    const int h = model_.hidden_size;
    const auto* table = static_cast<const uint8_t*>(embedding_->dense);
    const size_t row_bytes = size_t(h) * dtype_bytes(embedding_->dtype);
    const float scale = model_.embedding_scale;
    for_rows(tokens_, [&](int t) {
        float* row = floats(x) + int64_t(t) * h;
        if (table)
            k_.to_float(embedding_->dtype, table + token_ids_[t] * row_bytes, row, h);
        else
            expand_row(*embedding_, token_ids_[t], row);
        if (scale != 1.f)
            for (int i = 0; i < h; ++i) row[i] *= scale;
    });
}

void CpuBackend::rms_norm(Buffer& x, const std::vector<float>& weight, Buffer& y) {
    const int h = model_.hidden_size;
    for_rows(tokens_, [&](int t) {
        k_.rms_norm(floats(x) + int64_t(t) * h, weight.data(), floats(y) + int64_t(t) * h, h,
                    model_.norm_eps);
    });
}

void CpuBackend::add_rms_norm(Buffer& delta, Buffer& x, const std::vector<float>& weight, Buffer& y) {
    const int h = model_.hidden_size;
    for_rows(tokens_, [&](int t) {
        const int64_t row = int64_t(t) * h;
        k_.add(floats(delta) + row, floats(x) + row, h);
        k_.rms_norm(floats(x) + row, weight.data(), floats(y) + row, h, model_.norm_eps);
    });
}

void CpuBackend::linear(const Linear& w, Buffer& x, Buffer& y) {
    linear_(w, floats(x), tokens_, floats(y));
}

void CpuBackend::rope_and_cache(int layer, Buffer& qkv) {
    const int d = model_.head_dim;
    const RopeTable& table = model_.local_rope(layer) ? local_rope_ : rope_;
    const CacheLayout& layout = cache_.layout;
    const bool rotated = layout.layers[layer].rotated;
    if (rotated && centres_.measuring())
        centres_.add(layer, floats(qkv) + model_.num_heads * d, tokens_, model_.qkv_dim());
    const float* centre = centres_.of(layer);
    for_rows(tokens_, [&](int t) {
        float* row = floats(qkv) + int64_t(t) * model_.qkv_dim();
        const int position = positions_[t];
        const float* cos = table.cos.data() + int64_t(position) * table.half;
        const float* sin = table.sin.data() + int64_t(position) * table.half;
        for (int head = 0; head < model_.num_heads + model_.num_kv_heads; ++head)
            k_.rope(row + head * d, cos, sin, table.half);
        const int block = batch_->slices[row_slice_[t]].blocks[position / layout.block_len];
        const int place = position % layout.block_len;
        float* key = row + model_.num_heads * d;
        if (rotated) {
            if (centre)
                for (int i = 0; i < model_.num_kv_heads * d; ++i) key[i] -= centre[i];
            k_.hadamard(key, 2 * model_.num_kv_heads * d, rotation_block(d));  // values lie behind keys
        }
        for (int head = 0; head < 2 * model_.num_kv_heads; ++head, key += d)
            cache_.write(k_, block, layer, head / model_.num_kv_heads, head % model_.num_kv_heads, place,
                         key);
    });
}

void CpuBackend::begin_centring() {
    centres_.begin();
}

void CpuBackend::end_centring() {
    const auto mean = [&](const RopeTable& table) { return MeanRotation(table.cos, table.sin, table.half); };
    centres_.end(mean(rope_), mean(local_rope_));
}

void CpuBackend::attention(int layer, Buffer& qkv, Buffer& out) {
    attention_(layer, *batch_, first_, floats(qkv), floats(out));
}

void CpuBackend::silu_gate(Buffer& gate_up, Buffer& out) {
    const int64_t inter = model_.intermediate_size;
    for_rows(tokens_, [&](int t) {
        k_.silu_gate(floats(gate_up) + t * 2 * inter, floats(out) + t * inter, int(inter));
    });
}

void CpuBackend::qk_norm(const std::vector<float>& q, const std::vector<float>& k, Buffer& qkv) {
    const int d = model_.head_dim;
    for_rows(tokens_, [&](int t) {
        float* row = floats(qkv) + int64_t(t) * model_.qkv_dim();
        for (int head = 0; head < model_.num_heads + model_.num_kv_heads; ++head, row += d)
            k_.rms_norm(row, (head < model_.num_heads ? q : k).data(), row, d, model_.norm_eps);
    });
}

void CpuBackend::gelu_gate(Buffer& gate_up, Buffer& out) {
    const int64_t inter = model_.intermediate_size;
    for_rows(tokens_, [&](int t) {
        k_.gelu_gate(floats(gate_up) + t * 2 * inter, floats(out) + t * inter, int(inter));
    });
}

void CpuBackend::moe(const Moe& moe, Buffer& x, Buffer& y) {
    moe_(moe, floats(x), tokens_, floats(y));
}

template <class Normalise, class Project>
void CpuBackend::prompt_logprobs(const Slice& slice, int first, const Normalise& normalise,
                                 const Project& project, std::vector<Logprobs>& out) {
    constexpr int kRows = 32;  // at a time: their logits are large
    const int64_t h = model_.hidden_size, vocab = model_.vocab_size;
    logits_.resize(std::max(logits_.size(), size_t(kRows) * vocab));
    out.resize(slice.length);
    for (int begin = 0; begin < slice.length; begin += kRows) {
        const int rows = std::min(kRows, slice.length - begin);
        for_rows(rows, [&](int r) { normalise(first + begin + r, normed_.data() + r * h); });
        project(normed_.data(), rows, logits_.data());
        for_rows(rows, [&](int r) {
            out[begin + r] = logprobs_of(logits_.data() + r * vocab, int(vocab), slice.targets[begin + r],
                                         slice.sampling.prompt_logprobs);
        });
    }
}

void CpuBackend::finish(Buffer& delta, Buffer& x, const std::vector<float>& norm, const Linear& head,
                        BatchData& batch) {
    const int64_t h = model_.hidden_size, vocab = model_.vocab_size;
    const int slices = int(batch.slices.size());
    batch.samples.assign(slices, {});
    batch.logits.assign(slices, {});
    normed_.resize(std::max(normed_.size(), size_t(tokens_) * h));
    batch.logprobs.assign(slices, {});
    const auto normalise = [&](int row, float* out) {
        std::copy_n(floats(x) + row * h, h, out);
        k_.add(floats(delta) + row * h, out, h);
        k_.rms_norm(out, norm.data(), out, int(h), model_.norm_eps);
    };
    const auto project = [&](const float* rows, int count, float* out) {
        linear_(head, rows, count, out);
        if (model_.logit_softcap > 0.f)
            for_rows(count, [&](int r) { k_.softcap(out + r * vocab, vocab, 1.f, model_.logit_softcap); });
    };
    sample_rows_.assign(slices, nullptr);
    sampled_.clear();
    for (int i = 0; i < slices; ++i) {
        const Slice& slice = batch.slices[i];
        if (!slice.targets.empty()) prompt_logprobs(slice, first_[i], normalise, project, batch.logprobs[i]);
        if (slice.return_logits) {
            for_rows(slice.length, [&](int t) { normalise(first_[i] + t, normed_.data() + t * h); });
            batch.logits[i].resize(size_t(slice.length) * vocab);
            project(normed_.data(), slice.length, batch.logits[i].data());
            sample_rows_[i] = batch.logits[i].data() + (slice.length - 1) * vocab;
        } else if (slice.sample) {
            sampled_.push_back(i);
        }
    }
    if (!sampled_.empty()) {
        const int rows = int(sampled_.size());
        logits_.resize(std::max(logits_.size(), size_t(rows) * vocab));
        for_rows(rows, [&](int r) {
            const int i = sampled_[r];
            normalise(first_[i] + batch.slices[i].length - 1, normed_.data() + r * h);
        });
        project(normed_.data(), rows, logits_.data());
        for (int r = 0; r < rows; ++r) sample_rows_[sampled_[r]] = logits_.data() + r * vocab;
    }
    pool_.run(slices, [&](int i, int worker) {
        const Slice& slice = batch.slices[i];
        if (!slice.sample) return;
        const uint64_t position = uint64_t(slice.context + slice.length);
        const float* logits = sample_rows_[i];
        if (slice.edits) {
            auto& edited = edited_[worker];
            edited.assign(logits, logits + vocab);
            edit_logits(*slice.edits, last_token_[slice.slot], int(vocab), edited.data());
            logits = edited.data();
        }
        auto& sample = batch.samples[i] =
            samplers_[worker].sample(logits, int(vocab), slice.sampling, position);
        if (sample.finite && slice.sampling.logprobs >= 0)
            sample.logprobs = logprobs_of(sample_rows_[i], int(vocab), sample.token, slice.sampling.logprobs);
    });
    for (int i = 0; i < slices; ++i)
        if (batch.samples[i].token >= 0) last_token_[batch.slices[i].slot] = batch.samples[i].token;
}

}  // namespace turbomill::cpu
