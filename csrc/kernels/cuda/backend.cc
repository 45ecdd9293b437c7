#include "kernels/cuda/backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/cuda/attention_choice.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/error.h"

namespace turbomill::cuda {
namespace {

constexpr int kMaxHeadDim = 256;
// Decodes up to which attention rotates and caches their tokens: a launch less counts for more than the work.
constexpr int kFewTokens = 16;

// Device memory holding `values`.
template <class T>
DeviceMemory upload(const std::vector<T>& values, const std::string& what, cudaStream_t stream) {
    DeviceMemory memory(values.size() * sizeof(T), what, "lower session_len");
    check(cudaMemcpyAsync(memory.as(), values.data(), memory.bytes(), cudaMemcpyHostToDevice, stream),
          what.c_str());
    return memory;
}

const ModelConfig& supported(const ModelConfig& model) {
    require_known_variants(
        model, "cuda",
        {"rotary_dim", "rope_original_context", "local_rope_layers", "qk_norm", "post_norms",
         "embedding_scale", "attention_scale", "attention_softcap", "logit_softcap", "activation",
         "layer_windows", "num_experts", "experts_per_token", "expert_intermediate_size",
         "shared_expert_intermediate_size", "norm_topk_prob", "dense_layers"});
    if (model.head_dim > kMaxHeadDim || model.head_dim % 8)
        throw std::invalid_argument("head_dim is " + std::to_string(model.head_dim) +
                                    ", the cuda backend needs a multiple of 8 up to 256");
    return model;
}

int multiprocessors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
    return count;
}

DeviceMemory cache_memory(const CacheLayout& layout, const EngineConfig& config) {
    return {layout.block_bytes * config.cache_block_count, "the KV cache",
            "lower cache_max_entry_count, or use quant_policy 8, k8v4 or 4"};
}

// Sequences that hold a slot: one that just finished may still be in flight while its successor starts.
int most_slots(const EngineConfig& config) {
    return 2 * config.max_batch_size;
}

}  // namespace

CudaBackend::CudaBackend(const ModelConfig& model, const EngineConfig& config, const Weights& weights,
                         const std::vector<float>& inv_freq, const std::vector<float>& local_inv_freq)
    : model_(supported(model)),
      config_(config),
      device_(select_device(config.device)),
      type_(activation_type(weights)),
      weights_(weights, type_, stream_),
      stored_(weights),
      linear_(type_, weights_.largest_unfused(), weights_.largest_w8(), stream_),
      layout_(model, config),
      cache_bytes_(cache_memory(layout_, config)),
      caches_(cache_views(layout_, config)),
      attention_kernels_(choose_attention(type_, caches_, model.num_heads)),
      multiprocessors_(multiprocessors(device_)),
      prompt_tiles_(choose_prompt_tiles(type_, caches_, model, config)),
      rope_(inv_freq, config.session_len, model.rope_attention_factor, stream_),
      local_rope_(local_inv_freq, config.session_len, 1.f, stream_),
      moe_(model, weights, config.max_step_tokens(), type_, multiprocessors_, stream_),
      step_(config, {model, attention_kernels_, planned_policy(caches_), multiprocessors_, prompt_tiles_},
            most_slots(config)),
      last_token_((size_t(most_slots(config)) + 1) * 4, "the last tokens", "lower max_batch_size"),
      logit_rows_(most_slots(config)),
      normed_(size_t(logit_rows_) * model.hidden_size * dtype_bytes(type_), "the final norm",
              "lower max_batch_size"),
      logits_(size_t(logit_rows_) * model.vocab_size * 4, "the logits", "lower max_batch_size"),
      sample_parts_(size_t(logit_rows_) * sample_pieces(model.vocab_size) * sizeof(SamplePart),
                    "the sampler's workspace", "lower max_batch_size"),
      logprobs_at_((size_t(logit_rows_) * 4 + 15) / 16 * 16),
      results_(logprobs_at_ + size_t(logit_rows_) * sizeof(LogprobRow), "the samples",
               "lower max_batch_size"),
      host_results_{PinnedMemory(results_.bytes()), PinnedMemory(results_.bytes())},
      targets_(size_t(logit_rows_) * 4, "a prompt's next tokens", "lower max_batch_size"),
      target_logprobs_(size_t(logit_rows_) * sizeof(LogprobRow), "a prompt's logprobs",
                       "lower max_batch_size") {
    place_cache();
    const size_t slots =
        attention_kernels_ == AttentionKernels::Decode
            ? 2 * size_t(kMostDecodeRanges) * multiprocessors_
            : TilePlanner(model, attention_kernels_, planned_policy(caches_), multiprocessors_).slots() *
                  model.num_kv_heads;
    parts_ = DeviceMemory(slots * kQueryRows * (model.head_dim + 2) * 4, "attention's partial results",
                          "lower cache_max_entry_count");
    if (prompt_tiles_.unpacked_blocks) {
        unpacked_ = unpacked_view(caches_.front(), type_);
        unpacked_bytes_ = DeviceMemory(unpacked_.block_bytes * prompt_tiles_.unpacked_blocks,
                                       "a prompt's keys and values", "lower session_len");
        unpacked_.data = unpacked_bytes_.as<uint8_t>();
    }
    part_counters_ = DeviceMemory(slots * 4, "attention's counters", "lower cache_max_entry_count");
    if (slots) {
        check(cudaMemsetAsync(part_counters_.as(), 0, part_counters_.bytes(), stream_), "clearing counters");
    }
    std::vector<int> numbers(config.max_step_tokens());
    std::iota(numbers.begin(), numbers.end(), 0);
    row_numbers_ = upload(numbers, "row numbers", stream_);
    check(cudaMemsetAsync(last_token_.as(), 0, last_token_.bytes(), stream_), "clearing the last tokens");
    check(cudaStreamSynchronize(stream_), "starting");
    linear_.set_overlap(true);  // weights are in place
}

CudaBackend::~CudaBackend() {
    // Members free device memory; whoever destroys the backend may never have used this device.
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
}

std::unique_ptr<Buffer> CudaBackend::allocate(int rows, int columns) {
    return std::make_unique<DeviceBuffer>(size_t(rows) * columns, type_, false);
}

std::unique_ptr<Buffer> CudaBackend::allocate_residual(int rows, int columns) {
    return std::make_unique<DeviceBuffer>(size_t(rows) * columns, DType::F32, true);
}

bool CudaBackend::recordable(const BatchData& batch) const {
    if (attention_kernels_ != AttentionKernels::Decode || model_.group() > kQueryRows) return false;
    return int(batch.slices.size()) <= config_.max_batch_size &&
           std::all_of(batch.slices.begin(), batch.slices.end(), [](const Slice& s) {
               return s.length == 1 && s.sample && !s.return_logits && s.targets.empty() && !s.edits &&
                      s.sampling.logprobs < 0;
           });
}

bool CudaBackend::fuses_rope(const BatchData& batch) const {
    return recordable(batch) && int(batch.slices.size()) <= kFewTokens && !model_.qk_norm &&
           2 * rope_.half == model_.head_dim && model_.attention_softcap == 0.f &&
           std::all_of(caches_.begin(), caches_.end(),
                       [](const CacheView& c) { return !c.rotated || attention_decode_rotates(c); }) &&
           std::all_of(model_.layer_windows.begin(), model_.layer_windows.end(),
                       [](int window) { return window == 0; });
}

void CudaBackend::begin_step(const BatchData& batch) {
    check(cudaSetDevice(device_), "choosing the GPU");  // current per thread
    const int count = int(batch.slices.size());
    rope_fused_ = fuses_rope(batch);
    // Padded whether it is recorded or not, so that both give the same bits.
    step_.send(batch, recordable(batch) ? padded_rows(count, config_.max_batch_size) - count : 0, stream_);
    edits_.send(batch, step_.sampled, stream_);
}

void CudaBackend::sleep(int level) {
    check(cudaSetDevice(device_), "choosing the GPU");
    check(cudaStreamSynchronize(stream_), "falling asleep");
    graphs_.clear();  // they hold addresses
    cache_bytes_ = {};
    if (level == 2) weights_.release();
}

void CudaBackend::wake() {
    check(cudaSetDevice(device_), "choosing the GPU");
    if (!weights_.held()) {
        weights_ = DeviceWeights(stored_, type_, stream_);
        embedding_ = device_view(*table_, weights_);
    }
    if (!cache_bytes_.bytes()) cache_bytes_ = cache_memory(layout_, config_);
    place_cache();
}

void CudaBackend::place_cache() {
    for (size_t i = 0; i < caches_.size(); ++i)
        caches_[i].data = cache_bytes_.as<uint8_t>() + layout_.layers[i].offset;
}

void CudaBackend::copy_blocks(const std::vector<BlockCopy>& copies) {
    uint8_t* cache = cache_bytes_.as<uint8_t>();
    for (const BlockCopy& copy : copies)
        check(cudaMemcpyAsync(cache + copy.to * layout_.block_bytes, cache + copy.from * layout_.block_bytes,
                              layout_.block_bytes, cudaMemcpyDeviceToDevice, stream_),
              "copying a KV block");
}

void CudaBackend::run(BatchData& batch, const std::function<void()>& calls) {
    batch.samples.assign(batch.slices.size(), {});
    batch.logits.assign(batch.slices.size(), {});
    batch.logprobs.assign(batch.slices.size(), {});
    if (!config_.eager_mode && recordable(batch)) {
        batch.recorded = graphs_.run(step_.tokens, calls, stream_);
    } else {
        calls();
    }
    const size_t sampled = step_.sampled.size();
    const bool logprobs = step_.wants_logprobs;
    check(cudaMemcpyAsync(host_results_[side_].as(), results_.as(),
                          logprobs ? logprobs_at_ + sampled * sizeof(LogprobRow) : sampled * 4,
                          cudaMemcpyDeviceToHost, stream_),
          "copying samples");
    check(cudaEventRecord(done_[side_], stream_), "marking a step's end");
    issued_.push_back({&batch, step_.sampled, logprobs, side_});
    side_ ^= 1;
}

bool CudaBackend::ready() {
    return issued_.empty() || cudaEventQuery(done_[issued_.front().side]) != cudaErrorNotReady;
}

void CudaBackend::synchronize() {
    if (issued_.empty()) return check(cudaStreamSynchronize(stream_), "running a step");
    const Issued step = std::move(issued_.front());
    issued_.pop_front();
    check(cudaEventSynchronize(done_[step.side]), "running a step");
    for (size_t i = 0; i < step.sampled.size(); ++i) {
        const uint8_t* results = host_results_[step.side].as<uint8_t>();
        const int token = reinterpret_cast<const int*>(results)[i];
        auto& sample = step.batch->samples[step.sampled[i]] = {token, token >= 0, {}};
        if (step.logprobs && step.batch->slices[step.sampled[i]].sampling.logprobs >= 0)
            std::memcpy(&sample.logprobs, results + logprobs_at_ + i * sizeof(LogprobRow),
                        sizeof(LogprobRow));
    }
}

}  // namespace turbomill::cuda
