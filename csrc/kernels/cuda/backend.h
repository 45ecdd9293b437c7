#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cache_layout.h"
#include "kernels/cuda/device_weights.h"
#include "kernels/cuda/edits.h"
#include "kernels/cuda/graphs.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/rope_table.h"
#include "kernels/cuda/step.h"
#include "kernels/cuda/stream.h"

namespace turbomill::cuda {

// Activations in the model's type, the residual and every sum in fp32. Everything is queued on one stream,
// one step behind the other; the host waits in synchronize() alone. Steps of decodes alone are padded to few
// numbers of rows and recorded (StepGraphs). Nothing is allocated on the device after the constructor and the
// decoder's allocate() calls, except by steps that return logits and by recording.
class CudaBackend : public Backend {
  public:
    // `inv_freq` [D_rot/2]: rotary frequencies; `local_inv_freq` likewise, for the layers local_rope_layers.
    // Copies the weights, which the caller keeps: they name the copies.
    CudaBackend(const ModelConfig& model, const EngineConfig& config, const Weights& weights,
                const std::vector<float>& inv_freq, const std::vector<float>& local_inv_freq);
    ~CudaBackend() override;

    std::unique_ptr<Buffer> allocate(int rows, int columns) override;
    std::unique_ptr<Buffer> allocate_residual(int rows, int columns) override;
    void set_embedding(const Linear& table) override {
        table_ = &table;
        embedding_ = device_view(table, weights_);
    }
    void begin_step(const BatchData& batch) override;
    void copy_blocks(const std::vector<BlockCopy>& copies) override;
    void sleep(int level) override;
    void wake() override;
    void run(BatchData& batch, const std::function<void()>& calls) override;
    bool ready() override;
    void synchronize() override;
    void embed(Buffer& x) override;
    void rms_norm(Buffer& x, const std::vector<float>& weight, Buffer& y) override;
    void add_rms_norm(Buffer& delta, Buffer& x, const std::vector<float>& weight, Buffer& y) override;
    void linear(const Linear& w, Buffer& x, Buffer& y) override;
    void begin_centring() override;
    void end_centring() override;
    void rope_and_cache(int layer, Buffer& qkv) override;
    void attention(int layer, Buffer& qkv, Buffer& out) override;
    void silu_gate(Buffer& gate_up, Buffer& out) override;
    void silu_gated_linear(const Linear& w, Buffer& x, Buffer& gate_up, Buffer& out) override;
    void qk_norm(const std::vector<float>& q, const std::vector<float>& k, Buffer& qkv) override;
    void gelu_gate(Buffer& gate_up, Buffer& out) override;
    void moe(const Moe& moe, Buffer& x, Buffer& y) override;
    void finish(Buffer& delta, Buffer& x, const std::vector<float>& norm, const Linear& head,
                BatchData& batch) override;

    DType type() const { return type_; }
    cudaStream_t stream() const { return stream_; }

  private:
    // A step whose results the host does not have yet.
    struct Issued {
        BatchData* batch;
        std::vector<int> sampled;  // its slices that want a token
        bool logprobs;             // some of them also logprobs
        int side;
    };

    // Whether a step of this batch may be recorded: decodes that all want a token, and kernels whose launches
    // depend on the number of rows alone.
    bool recordable(const BatchData& batch) const;
    // Whether attention_decode rotates and caches this step's tokens.
    bool fuses_rope(const BatchData& batch) const;
    // Whether it also rotates a layer's outputs back.
    bool rotates_inside(int layer) const;
    void place_cache();  // the views' data
    const RopeTable& rope(int layer) const { return model_.local_rope(layer) ? local_rope_ : rope_; }
    AttentionParts parts() const { return {parts_.as<float>(), part_counters_.as<unsigned>()}; }
    AttentionArgs attention_args(int layer, Buffer& qkv, Buffer& out, const QueryTile* tiles,
                                 int count) const;
    void decode_attention(int layer, Buffer& qkv, Buffer& out);
    void prompt_attention(int layer, Buffer& qkv, Buffer& out);
    // Logprobs of every token of a slice that has targets, copied to the host in pieces.
    void copy_logprobs(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head, int slice,
                       BatchData& batch);
    // Logits [count, V] of rows of a slice from its row `begin` on, into logits_.
    void project(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head, int slice, int begin,
                 int count);
    // logits_ = those of the first `count` rows of normed_
    void output_linear(const DeviceLinear& head, int count);
    LogprobRow* sampled_logprobs() const {
        return reinterpret_cast<LogprobRow*>(results_.as<uint8_t>() + logprobs_at_);
    }
    // Logits of every token of a slice, likewise.
    void copy_logits(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head, int slice,
                     BatchData& batch);

    const ModelConfig& model_;
    const EngineConfig& config_;
    const int device_;
    const DType type_;
    Stream stream_;
    DeviceWeights weights_;
    const Weights& stored_;  // what weights_ are copies of
    const Linear* table_ = nullptr;
    DeviceLinear embedding_;
    LinearRunner linear_;
    const CacheLayout layout_;
    DeviceMemory cache_bytes_;
    std::vector<CacheView> caches_;  // by layer
    const AttentionKernels attention_kernels_;
    const int multiprocessors_;
    const PromptTiles prompt_tiles_;
    const RopeTable rope_, local_rope_;
    MoeRunner moe_;
    StepInputs step_;
    DeviceMemory parts_, part_counters_;  // where the parts of a decode's keys meet
    DeviceMemory unpacked_bytes_;         // a layer's keys and values for prompts, of a quantized cache
    CacheView unpacked_{};
    DeviceMemory last_token_;       // per slot, and one for padding
    const int logit_rows_;          // rows of the two below
    DeviceMemory normed_, logits_;  // [logit_rows, H] in T, [logit_rows, V] fp32
    DeviceMemory sample_parts_;
    EditInputs edits_;
    DeviceMemory edited_;           // logits with their edits, as large as logits_; made when first needed
    const size_t logprobs_at_;      // in results_
    DeviceMemory results_;          // tokens [sampled], then LogprobRow [sampled] where some are wanted
    PinnedMemory host_results_[2];  // likewise, of two steps in turn
    Event done_[2];                 // likewise
    DeviceMemory targets_, target_logprobs_;             // [logit_rows] of a prompt: tokens, LogprobRow
    DeviceMemory row_numbers_;                           // 0, 1, 2, ... as many as a step has rows
    std::deque<Issued> issued_;                          // oldest first, at most two
    int side_ = 0;                                       // of the step being issued
    bool rope_fused_ = false;                            // likewise
    const float *q_norm_ = nullptr, *k_norm_ = nullptr;  // for the next rope_and_cache()
    // [L, Nkv, D]: sums of the keys of so many tokens while they are measured, then the layers' centres
    DeviceMemory centres_;
    int centred_tokens_ = 0;
    bool centring_ = false;
    StepGraphs graphs_;
};

}  // namespace turbomill::cuda
