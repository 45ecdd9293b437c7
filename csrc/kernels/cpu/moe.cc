#include "kernels/cpu/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace turbomill::cpu {
namespace {

float* sized(std::vector<float>& buffer, size_t size) {
    buffer.resize(std::max(buffer.size(), size));
    return buffer.data();
}

}  // namespace

void MoeRunner::operator()(const Moe& moe, const float* x, int rows, float* y) {
    const int64_t h = model_.hidden_size;
    std::fill_n(y, rows * h, 0.f);
    route(moe, x, rows);
    for (int e = 0; e < model_.num_experts; ++e)
        if (!rows_of_[e].empty())
            add_expert(moe.gate_up[e], moe.down[e], model_.expert_intermediate_size, rows_of_[e], x, y);
    if (const int inter = model_.shared_expert_intermediate_size) {
        float* gate = sized(logits_, rows);
        linear_(moe.shared_gate, x, rows, gate);
        all_.resize(rows);
        for (int row = 0; row < rows; ++row) all_[row] = {row, 1.f / (1.f + std::exp(-gate[row]))};
        add_expert(moe.shared_gate_up, moe.shared_down, inter, all_, x, y);
    }
}

void MoeRunner::route(const Moe& moe, const float* x, int rows) {
    const int experts = model_.num_experts, top = model_.experts_per_token;
    float* logits = sized(logits_, size_t(rows) * experts);
    linear_(moe.router, x, rows, logits);
    rows_of_.resize(experts);
    for (auto& rows : rows_of_) rows.clear();
    order_.resize(experts);
    for (int row = 0; row < rows; ++row) {
        float* scores = logits + int64_t(row) * experts;
        std::iota(order_.begin(), order_.end(), 0);
        std::partial_sort(order_.begin(), order_.begin() + top, order_.end(), [&](int a, int b) {
            return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
        });
        // Softmax over all experts; when the chosen ones are to sum to one, over those alone.
        const float best = scores[order_[0]];
        const int counted = model_.norm_topk_prob ? top : experts;
        float total = 0.f;
        for (int i = 0; i < counted; ++i) total += std::exp(scores[order_[i]] - best);
        for (int i = 0; i < top; ++i)
            rows_of_[order_[i]].push_back({row, std::exp(scores[order_[i]] - best) / total});
    }
}

void MoeRunner::add_expert(const Linear& gate_up, const Linear& down, int inter,
                           const std::vector<Routed>& routed, const float* x, float* y) {
    const int64_t h = model_.hidden_size, count = int64_t(routed.size());
    float* gathered = sized(gathered_, count * h);
    float* pairs = sized(gate_up_, count * 2 * inter);
    float* hidden = sized(hidden_, count * inter);
    float* out = sized(out_, count * h);
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + routed[i].row * h, h, gathered + i * h);
    linear_(gate_up, gathered, int(count), pairs);
    pool_.run(int(count), [&](int i, int) {
        k_.silu_gate(pairs + int64_t(i) * 2 * inter, hidden + int64_t(i) * inter, inter);
    });
    linear_(down, hidden, int(count), out);
    for (int64_t i = 0; i < count; ++i) {
        float* target = y + routed[i].row * h;
        for (int64_t j = 0; j < h; ++j) target[j] += routed[i].weight * out[i * h + j];
    }
}

}  // namespace turbomill::cpu
