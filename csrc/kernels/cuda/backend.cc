#include "kernels/cuda/backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/cuda/device.h"
#include "kernels/cuda/error.h"

namespace turbomill::cuda {
namespace {

constexpr int kMaxHeadDim = 256;
// Decodes up to which attention rotates and caches their tokens: a launch less counts for more than the work.
constexpr int kFewTokens = 16;

class DeviceBuffer : public Buffer {
  public:
    explicit DeviceBuffer(size_t bytes)
        : memory_(bytes, "an activation buffer", "lower max_prefill_token_num or cache_max_entry_count") {}
    void* data() override { return memory_.as(); }

  private:
    DeviceMemory memory_;
};

CacheView view_of(const CacheLayout& layout, uint8_t* data) {
    return {data,
            int64_t(layout.block_bytes),
            int64_t(layout.layer_bytes),
            int(layout.row_bytes),
            int(layout.head_bytes),
            int(layout.param_bytes),
            layout.bits,
            layout.dtype,
            layout.heads,
            layout.head_dim,
            layout.block_len};
}

// Device memory holding `values`.
template <class T>
DeviceMemory upload(const std::vector<T>& values, const std::string& what, cudaStream_t stream) {
    DeviceMemory memory(values.size() * sizeof(T), what, "lower session_len");
    check(cudaMemcpyAsync(memory.as(), values.data(), memory.bytes(), cudaMemcpyHostToDevice, stream),
          what.c_str());
    return memory;
}

const ModelConfig& supported(const ModelConfig& model) {
    require_known_variants(model, "cuda", {"rotary_dim", "rope_original_context"});
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

AttentionKernels choose_attention(DType type, const CacheView& cache) {
    if (!attention_tensor_fits(type, cache)) return AttentionKernels::Any;
    return attention_decode_fits(type, cache) ? AttentionKernels::Decode : AttentionKernels::Tensor;
}

PromptTiles choose_prompt_tiles(DType type, const CacheView& cache, const ModelConfig& model,
                                const EngineConfig& config) {
    if (!attention_prompt_fits(type, cache, model.num_heads)) return {};
    const int tokens = std::max(config.session_len, config.max_step_tokens());
    return {prompt_tile_tokens(model.group()) * model.group(),
            cache.bits < 16 ? ceil_div(tokens, kUnpackedBlock) : 0};
}

// A quantized cache's blocks of one layer, unpacked.
CacheView unpacked_view(CacheView cache, DType type) {
    cache.row_bytes = cache.head_dim * int(dtype_bytes(type));
    cache.head_bytes = kUnpackedBlock * cache.row_bytes;
    cache.block_bytes = 2 * int64_t(cache.heads) * cache.head_bytes;
    cache.layer_bytes = cache.param_bytes = 0;
    cache.bits = 16;
    cache.dtype = type;
    cache.block_len = kUnpackedBlock;
    return cache;
}

bool wants_logprobs(const BatchData& batch) {
    return std::any_of(batch.slices.begin(), batch.slices.end(),
                       [](const Slice& s) { return s.sample && s.sampling.logprobs >= 0; });
}

DeviceMemory cache_memory(const CacheLayout& layout, const EngineConfig& config) {
    return {layout.block_bytes * config.cache_block_count, "the KV cache",
            "lower cache_max_entry_count, or use quant_policy 8 or 4"};
}

// Sequences that hold a slot: one that just finished may still be in flight while its successor starts.
int most_slots(const EngineConfig& config) {
    return 2 * config.max_batch_size;
}

}  // namespace

Stream::Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

Stream::~Stream() {
    cudaStreamDestroy(stream_);
}

Event::Event() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
}

Event::~Event() {
    cudaEventDestroy(event_);
}

CudaBackend::CudaBackend(const ModelConfig& model, const EngineConfig& config, const Weights& weights,
                         const std::vector<float>& inv_freq)
    : model_(supported(model)),
      config_(config),
      device_(select_device(config.device)),
      type_(activation_type(weights)),
      weights_(weights, type_, stream_),
      stored_(weights),
      linear_(type_, weights_.largest_unfused(), stream_),
      layout_(model, config),
      cache_bytes_(cache_memory(layout_, config)),
      cache_(view_of(layout_, cache_bytes_.as<uint8_t>())),
      attention_kernels_(choose_attention(type_, cache_)),
      multiprocessors_(multiprocessors(device_)),
      prompt_tiles_(choose_prompt_tiles(type_, cache_, model, config)),
      rope_half_(int(inv_freq.size())),
      step_(config, {model, attention_kernels_, cache_.bits, multiprocessors_, prompt_tiles_},
            most_slots(config)),
      last_token_((size_t(most_slots(config)) + 1) * 4, "the last tokens", "lower max_batch_size"),
      logit_rows_(most_slots(config)),
      normed_(size_t(logit_rows_) * model.hidden_size * dtype_bytes(type_), "the final norm",
              "lower max_batch_size"),
      logits_(size_t(logit_rows_) * model.vocab_size * 4, "the logits", "lower max_batch_size"),
      sample_parts_(size_t(logit_rows_) * sample_pieces(model.vocab_size) * sizeof(SamplePart),
                    "the sampler's workspace", "lower max_batch_size"),
      sample_counters_(size_t(logit_rows_) * 4, "the sampler's counters", "lower max_batch_size"),
      logprobs_at_((size_t(logit_rows_) * 4 + 15) / 16 * 16),
      results_(logprobs_at_ + size_t(logit_rows_) * sizeof(LogprobRow), "the samples",
               "lower max_batch_size"),
      host_results_{PinnedMemory(results_.bytes()), PinnedMemory(results_.bytes())},
      targets_(size_t(logit_rows_) * 4, "a prompt's next tokens", "lower max_batch_size"),
      target_logprobs_(size_t(logit_rows_) * sizeof(LogprobRow), "a prompt's logprobs",
                       "lower max_batch_size") {
    make_rope_table(inv_freq);
    const size_t slots = attention_kernels_ == AttentionKernels::Decode
                             ? 2 * size_t(kMostDecodeRanges) * multiprocessors_
                             : TilePlanner(model, attention_kernels_, cache_.bits, multiprocessors_).slots() *
                                   model.num_kv_heads;
    parts_ = DeviceMemory(slots * kQueryRows * (model.head_dim + 2) * 4, "attention's partial results",
                          "lower cache_max_entry_count");
    if (prompt_tiles_.unpacked_blocks) {
        unpacked_ = unpacked_view(cache_, type_);
        unpacked_bytes_ = DeviceMemory(unpacked_.block_bytes * prompt_tiles_.unpacked_blocks,
                                       "a prompt's keys and values", "lower session_len");
        unpacked_.data = unpacked_bytes_.as<uint8_t>();
    }
    part_counters_ = DeviceMemory(slots * 4, "attention's counters", "lower cache_max_entry_count");
    if (slots) {
        check(cudaMemsetAsync(part_counters_.as(), 0, part_counters_.bytes(), stream_), "clearing counters");
    }
    check(cudaMemsetAsync(sample_counters_.as(), 0, sample_counters_.bytes(), stream_), "clearing counters");
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

void CudaBackend::make_rope_table(const std::vector<float>& inv_freq) {
    const size_t half = inv_freq.size();
    std::vector<float> cos(half * config_.session_len), sin(cos.size());
    for (int position = 0; position < config_.session_len; ++position) {
        for (size_t i = 0; i < half; ++i) {
            // fp32 products, as the models were trained and as transformers computes them
            const float angle = float(position) * inv_freq[i];
            cos[position * half + i] = std::cos(angle) * model_.rope_attention_factor;
            sin[position * half + i] = std::sin(angle) * model_.rope_attention_factor;
        }
    }
    cos_ = upload(cos, "the rotary table", stream_);
    sin_ = upload(sin, "the rotary table", stream_);
    check(cudaStreamSynchronize(stream_), "copying the rotary table");
}

std::unique_ptr<Buffer> CudaBackend::allocate(int rows, int columns) {
    return std::make_unique<DeviceBuffer>(size_t(rows) * columns * dtype_bytes(type_));
}

std::unique_ptr<Buffer> CudaBackend::allocate_residual(int rows, int columns) {
    return std::make_unique<DeviceBuffer>(size_t(rows) * columns * 4);
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
    return recordable(batch) && int(batch.slices.size()) <= kFewTokens && 2 * rope_half_ == model_.head_dim;
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
        embedding_ = weights_.at(table_->dense ? table_->dense : table_->codes);
    }
    if (!cache_bytes_.bytes()) cache_bytes_ = cache_memory(layout_, config_);
    cache_.data = cache_bytes_.as<uint8_t>();
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
    const bool logprobs = wants_logprobs(batch);
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

void CudaBackend::embed(Buffer& x) {
    cuda::embed(type_, embedding_, step_.ids(), last_token_.as<int>(), static_cast<float*>(x.data()),
                step_.tokens, model_.hidden_size, stream_);
}

void CudaBackend::rms_norm(Buffer& x, const std::vector<float>& weight, Buffer& y) {
    cuda::rms_norm(type_,
                   {static_cast<float*>(x.data()), nullptr, nullptr, false, weights_.at(weight), y.data(),
                    step_.tokens, model_.hidden_size, model_.norm_eps},
                   stream_);
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
    cuda::rope_and_cache(type_,
                         {qkv.data(), cos_.as<float>(), sin_.as<float>(), rope_half_, step_.positions(),
                          step_.row_slice(), step_.slices(), step_.blocks(), step_.tokens, model_.num_heads},
                         cache_, layer, stream_);
}

void CudaBackend::attention(int layer, Buffer& qkv, Buffer& out) {
    const auto args = [&](const QueryTile* tiles, int count) {
        return AttentionArgs{qkv.data(), out.data(), step_.slices(),  step_.blocks(),
                             tiles,      count,      model_.num_heads};
    };
    const AttentionParts parts{parts_.as<float>(), part_counters_.as<unsigned>()};
    switch (attention_kernels_) {
        case AttentionKernels::Any:
            attention_any(type_, args(step_.decodes(), step_.decode_tiles), cache_, layer, stream_);
            break;
        case AttentionKernels::Tensor:
            attention_tensor(type_, args(step_.decodes(), step_.decode_tiles), parts, kQueryRows, cache_,
                             layer, stream_);
            break;
        case AttentionKernels::Decode:
            attention_decode(
                type_,
                {qkv.data(), out.data(), step_.ranges(), step_.entries(), step_.blocks(), step_.decode_ranges,
                 step_.decode_entries, step_.decode_rows, model_.num_heads,
                 rope_fused_ ? cos_.as<float>() : nullptr, rope_fused_ ? sin_.as<float>() : nullptr},
                parts, cache_, layer, stream_);
            break;
    }
    if (prompt_tiles_.rows) {
        prompt_attention(layer, qkv, out);
    } else if (step_.prompt_tiles) {
        attention_tensor(type_, args(step_.prompts(), step_.prompt_tiles), parts, kPromptRows, cache_, layer,
                         stream_);
    }
}

void CudaBackend::prompt_attention(int layer, Buffer& qkv, Buffer& out) {
    const bool unpacks = prompt_tiles_.unpacked_blocks > 0;
    int first = 0;
    for (const int end : step_.prompt_launches()) {
        const QueryTile* tiles = step_.prompts() + first;
        const int count = end - first;
        if (unpacks)
            kv_unpack(type_, {step_.slices(), step_.blocks(), tiles, count, unpacked_}, cache_, layer,
                      stream_);
        attention_prompt(
            type_, {qkv.data(), out.data(), step_.slices(), step_.blocks(), tiles, count, model_.num_heads},
            unpacks ? unpacked_ : cache_, unpacks, step_.tokens, layer, multiprocessors_, stream_);
        first = end;
    }
}

void CudaBackend::silu_gate(Buffer& gate_up, Buffer& out) {
    cuda::silu_gate(type_, gate_up.data(), out.data(), step_.tokens, model_.intermediate_size, stream_);
}

void CudaBackend::silu_gated_linear(const Linear& w, Buffer& x, Buffer& gate_up, Buffer& out) {
    if (!linear_.silu_gated(device_view(w, weights_), x.data(), step_.tokens, out.data()))
        Backend::silu_gated_linear(w, x, gate_up, out);
}

void CudaBackend::project(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head, int slice,
                          int begin, int count) {
    cuda::rms_norm(type_,
                   {static_cast<float*>(x.data()), delta.data(),
                    row_numbers_.as<int>() + step_.first_rows[slice] + begin, false, norm, normed_.as(),
                    count, model_.hidden_size, model_.norm_eps},
                   stream_);
    linear_(head, normed_.as(), count, logits_.as(), DType::F32);
}

void CudaBackend::copy_logprobs(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head,
                                int slice, BatchData& batch) {
    const Slice& s = batch.slices[slice];
    auto& out = batch.logprobs[slice];
    out.resize(s.length);
    for (int begin = 0; begin < s.length; begin += logit_rows_) {
        const int count = std::min(logit_rows_, s.length - begin);
        project(delta, x, norm, head, slice, begin, count);
        check(cudaMemcpyAsync(targets_.as(), s.targets.data() + begin, size_t(count) * 4,
                              cudaMemcpyHostToDevice, stream_),
              "sending a prompt's next tokens");
        logprobs(logits_.as<float>(), model_.vocab_size, nullptr, s.sampling.prompt_logprobs,
                 targets_.as<int>(), count, target_logprobs_.as<LogprobRow>(), stream_);
        check(cudaMemcpyAsync(out.data() + begin, target_logprobs_.as(), size_t(count) * sizeof(LogprobRow),
                              cudaMemcpyDeviceToHost, stream_),
              "copying a prompt's logprobs");
    }
}

void CudaBackend::copy_logits(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head,
                              int slice, BatchData& batch) {
    const int length = batch.slices[slice].length;
    auto& logits = batch.logits[slice];
    logits.resize(size_t(length) * model_.vocab_size);
    for (int begin = 0; begin < length; begin += logit_rows_) {
        const int count = std::min(logit_rows_, length - begin);
        project(delta, x, norm, head, slice, begin, count);
        check(cudaMemcpyAsync(logits.data() + size_t(begin) * model_.vocab_size, logits_.as(),
                              size_t(count) * model_.vocab_size * 4, cudaMemcpyDeviceToHost, stream_),
              "copying logits");
    }
}

void CudaBackend::finish(Buffer& delta, Buffer& x, const std::vector<float>& norm, const Linear& head,
                         BatchData& batch) {
    const DeviceLinear output = device_view(head, weights_);
    const float* weight = weights_.at(norm);
    for (int i = 0; i < int(batch.slices.size()); ++i) {
        if (batch.slices[i].return_logits) copy_logits(delta, x, weight, output, i, batch);
        if (!batch.slices[i].targets.empty()) copy_logprobs(delta, x, weight, output, i, batch);
    }
    const int count = step_.sample_count;
    if (count == 0) return;
    cuda::rms_norm(type_,
                   {static_cast<float*>(x.data()), delta.data(), step_.sampled_rows(), false, weight,
                    normed_.as(), count, model_.hidden_size, model_.norm_eps},
                   stream_);
    linear_(output, normed_.as(), count, logits_.as(), DType::F32);
    const float* logits = logits_.as<float>();
    if (edits_.view().count > 0) {
        // A copy: logprobs are of the model's own.
        if (!edited_.bytes())
            edited_ = DeviceMemory(logits_.bytes(), "edited logits", "lower max_batch_size");
        check(cudaMemcpyAsync(edited_.as(), logits_.as(), size_t(count) * model_.vocab_size * 4,
                              cudaMemcpyDeviceToDevice, stream_),
              "copying logits");
        edit_logits(edited_.as<float>(), model_.vocab_size, edits_.view(), last_token_.as<int>(), stream_);
        logits = edited_.as<float>();
    }
    sample(logits, model_.vocab_size, step_.samples(), count, results_.as<int>(), last_token_.as<int>(),
           {sample_parts_.as<SamplePart>(), sample_counters_.as<unsigned>()}, stream_);
    if (wants_logprobs(batch))
        logprobs(logits_.as<float>(), model_.vocab_size, step_.samples(), 0, results_.as<int>(), count,
                 sampled_logprobs(), stream_);
}

}  // namespace turbomill::cuda
