#pragma once

#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/backend.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_cache.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/moe.h"
#include "kernels/key_centres.h"
#include "kernels/sampling.h"

namespace turbomill::cpu {

// fp32 activations, weights and cache in their stored types. All calls come from the executor thread.
class CpuBackend : public Backend {
  public:
    // `inv_freq` [D_rot/2]: rotary frequencies; `local_inv_freq` likewise, for the layers local_rope_layers.
    CpuBackend(const ModelConfig& model, const EngineConfig& config, const std::vector<float>& inv_freq,
               const std::vector<float>& local_inv_freq);

    std::unique_ptr<Buffer> allocate(int rows, int columns) override;
    void set_embedding(const Linear& table) override { embedding_ = &table; }
    void begin_step(const BatchData& batch) override;
    void copy_blocks(const std::vector<BlockCopy>& copies) override { cache_.copy(copies); }
    // Weights are the store's mapped file, which the system drops when it needs the memory.
    void sleep(int /*level*/) override { cache_.drop(); }
    void wake() override {}
    void synchronize() override {}
    void embed(Buffer& x) override;
    void rms_norm(Buffer& x, const std::vector<float>& weight, Buffer& y) override;
    void add_rms_norm(Buffer& delta, Buffer& x, const std::vector<float>& weight, Buffer& y) override;
    void linear(const Linear& w, Buffer& x, Buffer& y) override;
    void begin_centring() override;
    void end_centring() override;
    void rope_and_cache(int layer, Buffer& qkv) override;
    void attention(int layer, Buffer& qkv, Buffer& out) override;
    void silu_gate(Buffer& gate_up, Buffer& out) override;
    void qk_norm(const std::vector<float>& q, const std::vector<float>& k, Buffer& qkv) override;
    void gelu_gate(Buffer& gate_up, Buffer& out) override;
    void moe(const Moe& moe, Buffer& x, Buffer& y) override;
    void finish(Buffer& delta, Buffer& x, const std::vector<float>& norm, const Linear& head,
                BatchData& batch) override;

  private:
    // Cosines and sines of every position.
    struct RopeTable {
        RopeTable(const std::vector<float>& inv_freq, int positions, float factor);
        int half;                     // D_rot/2
        std::vector<float> cos, sin;  // [session_len, D_rot/2]
    };

    // fn(row) for the rows of a step, a few at a time
    template <class F>
    void for_rows(int rows, F&& fn);
    // Of every row of a slice, whose first row is `first`, a few at a time.
    template <class Normalise, class Project>
    void prompt_logprobs(const Slice& slice, int first, const Normalise& normalise, const Project& project,
                         std::vector<Logprobs>& out);

    const ModelConfig& model_;
    const EngineConfig& config_;
    const Kernels& k_;
    ThreadPool pool_;
    KvCache cache_;
    LinearRunner linear_;
    Attention attention_;
    MoeRunner moe_;
    const Linear* embedding_ = nullptr;
    std::vector<Sampler> samplers_;           // per worker
    std::vector<std::vector<float>> edited_;  // likewise, a row of logits [V]
    RopeTable rope_, local_rope_;
    KeyCentres centres_;
    std::vector<int> last_token_;  // per slot

    // The current step.
    const BatchData* batch_ = nullptr;
    int tokens_ = 0;
    std::vector<int> first_;                              // slice -> its first row
    std::vector<int> token_ids_, positions_, row_slice_;  // [T]
    std::vector<float> normed_, logits_;
    std::vector<int> sampled_;               // slices that need their last row only
    std::vector<const float*> sample_rows_;  // slice -> the row of logits its sample is drawn from
};

}  // namespace turbomill::cpu
