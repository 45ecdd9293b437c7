// Tensors of a model store: memory-mapped files and typed views into them. Nothing is copied or repacked.
#pragma once

#include <functional>
#include <memory>
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
    std::string layout;  // vector, dense.nk, w4.n64k64, group.n64: see convert/FORMAT.md
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
    const uint8_t* codes = nullptr;  // [N/64, K/64, 2048]
    const void* scales = nullptr;    // [N/64, G, 64] in `dtype`, pair order
    const void* zeros = nullptr;     // as scales; null means 8
    DType dtype = DType::F32;
    int group = 0;            // rows of K that share a scale
    int k_tiles = 0;          // K/64 as stored
    int groups = 0;           // G as stored
    std::vector<float> bias;  // [N] or empty
};

struct DecoderLayer {
    std::vector<float> attention_norm, ffn_norm;  // [H]
    Linear qkv, o, gate_up, down;
};

// All weights of a decoder, resolved from a store's tensors and checked against the configuration.
// Throws std::runtime_error naming the tensor.
class Weights {
  public:
    Weights(const ModelConfig& config, const std::vector<TensorRef>& tensors);
    Weights() = default;  // to be filled by hand, in tests of kernels

    Linear embedding;                  // dense [V, H]
    Linear output;                     // dense or quantized [V, H]; the embedding when tied
    std::vector<float> norm;           // [H]
    std::vector<float> rope_inv_freq;  // [D_rot/2]
    std::vector<DecoderLayer> layers;

    // Everything a backend may have to copy: each linear, each vector but the linears' biases.
    void each_linear(const std::function<void(const Linear&)>& f) const;
    void each_vector(const std::function<void(const std::vector<float>&)>& f) const;

  private:
    const TensorRef& find(const std::string& name) const;
    const uint8_t* view(const TensorRef& tensor);
    std::vector<float> vector(const std::string& name, int length);
    Linear linear(const std::string& prefix, int n, int k);
    void require_shape(const TensorRef& tensor, const std::string& layout, std::vector<int64_t> shape) const;

    std::unordered_map<std::string, TensorRef> tensors_;
    std::unordered_map<std::string, std::unique_ptr<MappedFile>> files_;
};

}  // namespace turbomill
