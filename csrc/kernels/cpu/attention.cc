#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/blas.h"

namespace turbomill::cpu {
namespace {

constexpr int kQueryTile = 32;  // query tokens that share one pass over the keys

}  // namespace

Attention::Attention(const ModelConfig& model, const Kernels& kernels, const KvCache& cache, ThreadPool& pool,
                     bool deterministic)
    : model_(model),
      k_(kernels),
      cache_(cache),
      pool_(pool),
      deterministic_(deterministic),
      scratch_(pool.size()) {
    const size_t rows = size_t(kQueryTile) * model.group(), d = model.head_dim, p = cache.layout.block_len;
    for (auto& s : scratch_) {
        s.query.resize(rows * d);
        s.acc.resize(rows * d);
        s.keys.resize(p * d);
        s.values.resize(p * d);
        s.scores.resize(rows * p);
        s.max.resize(rows);
        s.sum.resize(rows);
    }
}

void Attention::operator()(int layer, const BatchData& batch, const std::vector<int>& first, const float* qkv,
                           float* out) {
    tiles_.clear();
    for (int i = 0; i < int(batch.slices.size()); ++i)
        for (int begin = 0; begin < batch.slices[i].length; begin += kQueryTile)
            tiles_.push_back({i, begin, std::min(kQueryTile, batch.slices[i].length - begin)});
    const int heads = model_.num_kv_heads;
    pool_.run(int(tiles_.size()) * heads, [&](int task, int worker) {
        // Last tiles first: they see the most keys, and short ones fill the end.
        const Tile& t = tiles_[tiles_.size() - 1 - task / heads];
        const int64_t row = first[t.slice] + t.begin;
        tile(layer, batch.slices[t.slice], t, task % heads, qkv + row * model_.qkv_dim(),
             out + row * model_.q_dim(), scratch_[worker]);
    });
}

void Attention::tile(int layer, const Slice& slice, const Tile& t, int head, const float* qkv, float* out,
                     Scratch& s) {
    const int d = model_.head_dim, group = model_.group(), block_len = cache_.layout.block_len;
    const bool rotated = cache_.layout.layers[layer].rotated;  // then scores and outputs are of rotated rows
    const int rows = t.count * group;  // row r is query token r / group, query head head * group + r % group
    for (int r = 0; r < rows; ++r) {
        const float* q = qkv + int64_t(r / group) * model_.qkv_dim() + (head * group + r % group) * d;
        std::copy_n(q, d, s.query.data() + int64_t(r) * d);
        if (rotated) k_.hadamard(s.query.data() + int64_t(r) * d, d, rotation_block(d));
    }
    const bool few = deterministic_ || rows <= kMaxRows;  // a row is computed as if it were alone
    std::fill_n(s.acc.data(), size_t(rows) * d, 0.f);
    std::fill_n(s.max.data(), rows, -std::numeric_limits<float>::infinity());
    std::fill_n(s.sum.data(), rows, 0.f);

    const float scale = model_.score_scale(), cap = model_.attention_softcap;
    const int first_position = slice.context + t.begin;
    const int end = first_position + t.count;  // keys that the last query sees
    const int window = model_.window(layer) ? model_.window(layer) : end;
    const int start = std::max(0, first_position + 1 - window);  // keys before it no query sees
    for (int begin = start / block_len * block_len; begin < end; begin += block_len) {
        const int count = std::min(block_len, end - begin), block = slice.blocks[begin / block_len];
        const float* keys = load(layer, block, 0, head, count, s.keys);
        if (few) {
            for (int r = 0; r < rows; r += kMaxRows)
                k_.linear_dense(DType::F32, keys, s.query.data() + int64_t(r) * d, d,
                                s.scores.data() + int64_t(r) * block_len, block_len,
                                std::min(kMaxRows, rows - r), d, 0, count);
        } else {
            gemm_nt(rows, count, d, s.query.data(), d, keys, d, s.scores.data(), block_len);
        }
        const float* values = load(layer, block, 1, head, count, s.values);
        for (int r = 0; r < rows; ++r) {
            float* scores = s.scores.data() + int64_t(r) * block_len;
            float* acc = s.acc.data() + int64_t(r) * d;
            // The query sees the keys [first, last) of this block.
            const int beyond = first_position + r / group + 1 - begin;
            const int last = std::clamp(beyond, 0, count), first = std::clamp(beyond - window, 0, last);
            const int seen = last - first;
            if (cap > 0.f) k_.softcap(scores + first, seen, scale, cap);
            if (seen > 0)
                k_.softmax_step(scores + first, seen, cap > 0.f ? 1.f : scale, &s.max[r], &s.sum[r], acc, d);
            std::fill(scores, scores + first, 0.f);
            std::fill(scores + last, scores + count, 0.f);
            if (few) k_.weighted_sum(scores + first, values + int64_t(first) * d, seen, d, acc);
        }
        if (!few) gemm_nn_add(rows, d, count, s.scores.data(), block_len, values, d, s.acc.data(), d);
    }
    for (int r = 0; r < rows; ++r) {
        float* o = out + int64_t(r / group) * model_.q_dim() + (head * group + r % group) * d;
        const float inverse = 1.f / s.sum[r];
        for (int i = 0; i < d; ++i) o[i] = s.acc[int64_t(r) * d + i] * inverse;
        if (rotated) k_.hadamard(o, d, rotation_block(d));
    }
}

const float* Attention::load(int layer, int block, int value, int head, int count,
                             std::vector<float>& scratch) const {
    const CacheLayout& layout = cache_.layout;
    const uint8_t* rows = cache_.rows(block, layer, value, head);
    const LayerLayout& l = layout.layers[layer];
    if (l.formats.quantized()) {
        const uint16_t* params = cache_.params(block, layer, value, head);
        for (int t = 0; t < count; ++t)
            k_.kv_dequantize(l.formats[value], rows + t * l.row_bytes[value], params + 2 * t, layout.head_dim,
                             scratch.data() + int64_t(t) * layout.head_dim);
        return scratch.data();
    }
    if (layout.dtype == DType::F32) return reinterpret_cast<const float*>(rows);
    k_.to_float(layout.dtype, rows, scratch.data(), int64_t(count) * layout.head_dim);
    return scratch.data();
}

}  // namespace turbomill::cpu
