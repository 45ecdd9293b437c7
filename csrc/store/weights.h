// Tensors of a model store: memory-mapped files and typed views into them. Nothing is copied or repacked.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/config.h"
#include "core/types.h"

namespace turbomill {

// A read-only mapping of a whole file, shared with every process that maps it.
class MappedFile {
  public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    const uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

struct TensorRef {
    std::string name;
    std::string layout;  // vector, dense.nk, w4.n64k64, w8.n64k64, group.n64: see convert/FORMAT.md
    DType dtype = DType::F32;
    std::vector<int64_t> shape;
    std::string path;
    size_t offset = 0;
    size_t nbytes = 0;
};

// A linear's weight as stored. Exactly one of `dense` and `codes` is set.
struct Linear {
    int n = 0, k = 0;                // logical sizes
    const void* dense = nullptr;     // [N, K] in `dtype`
    const uint8_t* codes = nullptr;  // [N/64, K/64, 512 * bits]
    const void* scales = nullptr;    // [N/64, G, 64] in `dtype`, pair order
    const void* zeros = nullptr;     // as scales; null means 8, of 8 bits 128
    const void* mins = nullptr;      // as scales, or null: what is added to code * scale, in place of zeros
    DType dtype = DType::F32;
    int bits = 4;             // of a stored code: 4 or 8
    int group = 0;            // rows of K that share a scale
    int k_tiles = 0;          // K/64 as stored
    int groups = 0;           // G as stored
    std::vector<float> bias;  // [N] or empty
    std::vector<int> order;   // [K] the input that each column of the codes meets, or empty: its own

    bool looked_up = false;  // rows are read one by one: the embedding, or what is tied to it
};

// A mixture of experts. The experts of one linear lie one after the other, each laid out as a linear of its
// own: pointers of expert e are those of expert 0 plus e times a constant.
struct Moe {
    Linear router;                                    // [E, H]
    std::vector<Linear> gate_up, down;                // [E] of [2 Ie, H] and [H, Ie]
    Linear shared_gate, shared_gate_up, shared_down;  // [1, H], [2 Is, H], [H, Is]; empty without one
};

struct DecoderLayer {
    std::vector<float> attention_norm, ffn_norm;            // [H]
    std::vector<float> q_norm, k_norm;                      // [D], or empty
    std::vector<float> post_attention_norm, post_ffn_norm;  // [H], or empty
    Linear qkv, o;
    Linear gate_up, down;  // unless there are experts
    std::optional<Moe> moe;
};

// All weights of a decoder, resolved from a store's tensors and checked against the configuration.
// Throws std::runtime_error naming the tensor.
class Weights {
  public:
    Weights(const ModelConfig& config, const std::vector<TensorRef>& tensors);
    Weights() = default;  // to be filled by hand, in tests of kernels

    Linear embedding;                        // dense or quantized [V, H]
    Linear output;                           // dense or quantized [V, H]; the embedding when tied
    std::vector<float> norm;                 // [H]
    std::vector<float> rope_inv_freq;        // [D_rot/2]
    std::vector<float> rope_long_inv_freq;   // for sessions beyond rope_original_context, or empty
    std::vector<float> rope_local_inv_freq;  // of the layers local_rope_layers, or empty
    std::vector<DecoderLayer> layers;

    // Everything a backend may have to copy: each linear that is none of several experts, each linear's
    // experts, each vector but the linears' biases.
    void each_single(const std::function<void(const Linear&)>& f) const;
    void each_stack(const std::function<void(const std::vector<Linear>&)>& f) const;
    void each_vector(const std::function<void(const std::vector<float>&)>& f) const;
    // The frequencies of a session of this length. One choice for the whole session: keys that were rotated
    // with one table cannot be attended to with another.
    const std::vector<float>& inv_freq(const ModelConfig& config, int session_len) const;

  private:
    const TensorRef& find(const std::string& name) const;
    const uint8_t* view(const TensorRef& tensor);
    std::vector<float> vector(const std::string& name, int length);
    std::vector<int> permutation(const std::string& name, int length);
    Linear linear(const std::string& prefix, int n, int k);
    // The experts of a linear, stacked along a leading dimension.
    std::vector<Linear> experts(const std::string& prefix, int count, int n, int k);
    // `count` linears, with a leading dimension in the stored shapes if `stacked`.
    std::vector<Linear> linears(const std::string& prefix, int count, bool stacked, int n, int k);
    DecoderLayer layer(const ModelConfig& config, int index);
    Moe moe(const ModelConfig& config, const std::string& prefix);
    void require_shape(const TensorRef& tensor, const std::string& layout, std::vector<int64_t> shape) const;

    std::unordered_map<std::string, TensorRef> tensors_;
    std::unordered_map<std::string, std::unique_ptr<MappedFile>> files_;
};

}  // namespace turbomill
