#include "kernels/cuda/moe.h"

#include <stdexcept>

namespace turbomill::cuda {
namespace {

constexpr int kFewRowsEach = 8;  // rows of an expert in the mean

DeviceMemory workspace(size_t elements, size_t bytes) {
    return {elements * bytes, "the workspace of experts", "lower max_prefill_token_num"};
}

}  // namespace

MoeRunner::MoeRunner(const ModelConfig& model, const Weights& weights, int tokens, DType type,
                     int multiprocessors, cudaStream_t stream)
    : model_(model), type_(type), multiprocessors_(multiprocessors), stream_(stream) {
    if (!model.num_experts) return;
    for (const auto& layer : weights.layers) {
        if (!layer.moe) continue;
        const Linear& gate = layer.moe->shared_gate;
        if (gate.n && kept(gate) != Kept::Dense)
            throw std::invalid_argument(
                "the gate of a shared expert is quantized: the cuda backend needs it in 16 bits");
    }
    const size_t t = tokens, pairs = t * model.experts_per_token, size = dtype_bytes(type);
    const size_t inter = model.expert_intermediate_size, shared = model.shared_expert_intermediate_size;
    logits_ = workspace(t * model.num_experts, 4);
    chosen_ = workspace(pairs, 4);
    weights_ = workspace(pairs, 4);
    offsets_ = workspace(model.num_experts + 1, 4);
    pairs_ = workspace(pairs, 4);
    places_ = workspace(pairs, 4);
    sorted_ = workspace(pairs * model.hidden_size, size);
    gate_up_ = workspace(pairs * 2 * inter, size);
    hidden_ = workspace(pairs * inter, size);
    if (!shared) return;
    shared_gate_ = workspace(t, 4);
    shared_gate_up_ = workspace(t * 2 * shared, size);
    shared_hidden_ = workspace(t * shared, size);
    shared_out_ = workspace(t * model.hidden_size, size);
}

void MoeRunner::operator()(const Moe& moe, const DeviceWeights& weights, LinearRunner& linear, const void* x,
                           int rows, void* y) {
    const int h = model_.hidden_size;
    const Routing routing{rows,
                          model_.num_experts,
                          model_.experts_per_token,
                          chosen_.as<int>(),
                          weights_.as<float>(),
                          offsets_.as<int>(),
                          pairs_.as<int>(),
                          places_.as<int>()};
    const ExpertRows all{routing.offsets, routing.experts, routing.pair_count()};
    linear(device_view(moe.router, weights), x, rows, logits_.as(), DType::F32);
    moe_route(logits_.as<float>(), model_.norm_topk_prob, routing, stream_);
    moe_gather(type_, x, routing, h, sorted_.as(), stream_);
    experts(expert_view(moe.gate_up[0], weights), sorted_.as(), all, hidden_.as(), true);
    experts(expert_view(moe.down[0], weights), hidden_.as(), all, sorted_.as(), false);
    const void* shared =
        model_.shared_expert_intermediate_size ? shared_expert(moe, weights, linear, x, rows) : nullptr;
    moe_combine(type_, sorted_.as(), routing, shared_gate_.as<float>(), shared, h, y, stream_);
}

void MoeRunner::experts(const DeviceLinear& w, const void* x, const ExpertRows& rows, void* y, bool gated) {
    if (!w.dense && w4_fused_fits(type_, w.w4, x) && (!gated || w.n % 16 == 0))
        return grouped_w4_fused(type_, w.w4, x, y, rows, multiprocessors_, gated, stream_);
    // For few rows, grouped_dense is bound by the weights' bytes, and near that.
    if (w.dense && rows.rows > kFewRowsEach * rows.experts && grouped_dense_fused_fits(type_, w.k) &&
        (!gated || w.n % 16 == 0))
        return grouped_dense_fused(type_, w.dense, w.n, w.k, x, y, rows, multiprocessors_, gated, stream_);
    void* product = gated ? gate_up_.as() : y;
    if (w.dense)
        grouped_dense(type_, w.dense, w.n, w.k, x, product, rows, stream_);
    else
        grouped_w4(type_, w.w4, x, product, rows, stream_);
    if (gated) silu_gate(type_, product, y, rows.rows, w.n / 2, stream_);
}

const void* MoeRunner::shared_expert(const Moe& moe, const DeviceWeights& weights, LinearRunner& linear,
                                     const void* x, int rows) {
    const DeviceLinear gate_up = device_view(moe.shared_gate_up, weights);
    moe_shared_gate(type_, x, device_view(moe.shared_gate, weights).dense, rows, model_.hidden_size,
                    shared_gate_.as<float>(), stream_);
    if (!linear.silu_gated(gate_up, x, rows, shared_hidden_.as())) {
        linear(gate_up, x, rows, shared_gate_up_.as(), type_);
        silu_gate(type_, shared_gate_up_.as(), shared_hidden_.as(), rows,
                  model_.shared_expert_intermediate_size, stream_);
    }
    linear(device_view(moe.shared_down, weights), shared_hidden_.as(), rows, shared_out_.as(), type_);
    return shared_out_.as();
}

}  // namespace turbomill::cuda
