#include "store/weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "core/half.h"

namespace turbomill {
namespace {

constexpr int kTile = 64;

[[noreturn]] void fail(const std::string& message) {
    throw std::runtime_error(message);
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (const int64_t extent : shape) {
        if (text.size() > 1) text += ", ";
        text += std::to_string(extent);
    }
    return text + "]";
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(path + ": " + std::strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0 || info.st_size == 0) {
        close(fd);
        fail(path + ": empty or unreadable");
    }
    size_ = size_t(info.st_size);
    void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    const int error = errno;
    close(fd);
    if (mapped == MAP_FAILED) fail(path + ": " + std::strerror(error));
    data_ = static_cast<const uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
    munmap(const_cast<uint8_t*>(data_), size_);
}

Weights::Weights(const ModelConfig& c, const std::vector<TensorRef>& tensors) {
    for (const auto& tensor : tensors) tensors_.emplace(tensor.name, tensor);
    embedding = linear("tok_embeddings", c.vocab_size, c.hidden_size);
    if (!embedding.order.empty()) fail("tok_embeddings.order: an embedding has none");
    embedding.looked_up = true;
    output = c.tie_word_embeddings ? embedding : linear("output", c.vocab_size, c.hidden_size);
    norm = vector("norm.weight", c.hidden_size);
    rope_inv_freq = vector("rope.inv_freq", c.rotary() / 2);
    if (c.rope_original_context) rope_long_inv_freq = vector("rope_long.inv_freq", c.rotary() / 2);
    if (!c.local_rope_layers.empty()) rope_local_inv_freq = vector("rope_local.inv_freq", c.rotary() / 2);
    layers.reserve(c.num_layers);
    for (int i = 0; i < c.num_layers; ++i) layers.push_back(layer(c, i));
}

DecoderLayer Weights::layer(const ModelConfig& c, int index) {
    const std::string p = "layers." + std::to_string(index) + ".";
    DecoderLayer layer;
    layer.attention_norm = vector(p + "attention_norm.weight", c.hidden_size);
    layer.ffn_norm = vector(p + "ffn_norm.weight", c.hidden_size);
    if (c.qk_norm) {
        layer.q_norm = vector(p + "q_norm.weight", c.head_dim);
        layer.k_norm = vector(p + "k_norm.weight", c.head_dim);
    }
    if (c.post_norms) {
        layer.post_attention_norm = vector(p + "post_attention_norm.weight", c.hidden_size);
        layer.post_ffn_norm = vector(p + "post_ffn_norm.weight", c.hidden_size);
    }
    layer.qkv = linear(p + "w_qkv", c.qkv_dim(), c.hidden_size);
    layer.o = linear(p + "w_o", c.hidden_size, c.q_dim());
    if (c.sparse(index)) {
        layer.moe = moe(c, p);
    } else {
        layer.gate_up = linear(p + "w_gate_up", 2 * c.intermediate_size, c.hidden_size);
        layer.down = linear(p + "w_down", c.hidden_size, c.intermediate_size);
    }
    return layer;
}

Moe Weights::moe(const ModelConfig& c, const std::string& p) {
    Moe moe;
    moe.router = linear(p + "router", c.num_experts, c.hidden_size);
    moe.gate_up =
        experts(p + "experts.w_gate_up", c.num_experts, 2 * c.expert_intermediate_size, c.hidden_size);
    moe.down = experts(p + "experts.w_down", c.num_experts, c.hidden_size, c.expert_intermediate_size);
    if (const int shared = c.shared_expert_intermediate_size) {
        moe.shared_gate = linear(p + "shared_gate", 1, c.hidden_size);
        moe.shared_gate_up = linear(p + "shared.w_gate_up", 2 * shared, c.hidden_size);
        moe.shared_down = linear(p + "shared.w_down", c.hidden_size, shared);
    }
    return moe;
}

const std::vector<float>& Weights::inv_freq(const ModelConfig& c, int session_len) const {
    const bool use_long = c.rope_original_context && session_len > c.rope_original_context;
    return use_long ? rope_long_inv_freq : rope_inv_freq;
}

void Weights::each_single(const std::function<void(const Linear&)>& f) const {
    const auto visit = [&](const Linear& w) {
        if (w.n) f(w);
    };
    visit(embedding);
    visit(output);
    for (const auto& layer : layers) {
        for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) visit(*w);
        if (!layer.moe) continue;
        const Moe& moe = *layer.moe;
        for (const Linear* w : {&moe.router, &moe.shared_gate, &moe.shared_gate_up, &moe.shared_down})
            visit(*w);
    }
}

void Weights::each_stack(const std::function<void(const std::vector<Linear>&)>& f) const {
    for (const auto& layer : layers) {
        if (!layer.moe) continue;
        f(layer.moe->gate_up);
        f(layer.moe->down);
    }
}

void Weights::each_vector(const std::function<void(const std::vector<float>&)>& f) const {
    f(norm);
    for (const auto& layer : layers)
        for (const auto* v : {&layer.attention_norm, &layer.ffn_norm, &layer.q_norm, &layer.k_norm,
                              &layer.post_attention_norm, &layer.post_ffn_norm})
            if (!v->empty()) f(*v);
}

const TensorRef& Weights::find(const std::string& name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) fail(name + ": missing from the store");
    return it->second;
}

const uint8_t* Weights::view(const TensorRef& tensor) {
    auto& file = files_[tensor.path];
    if (!file) file = std::make_unique<MappedFile>(tensor.path);
    size_t bytes = dtype_bytes(tensor.dtype);
    for (const int64_t extent : tensor.shape) bytes *= size_t(extent);
    if (bytes != tensor.nbytes)
        fail(tensor.name + ": " + std::to_string(tensor.nbytes) + " bytes, expected " +
             std::to_string(bytes) + " for shape " + shape_text(tensor.shape));
    if (tensor.offset > file->size() || tensor.nbytes > file->size() - tensor.offset)
        fail(tensor.name + ": reaches past the end of " + tensor.path);
    return file->data() + tensor.offset;
}

void Weights::require_shape(const TensorRef& tensor, const std::string& layout,
                            std::vector<int64_t> shape) const {
    if (tensor.layout != layout)
        fail(tensor.name + ": layout '" + tensor.layout + "', expected '" + layout + "'");
    if (tensor.shape != shape)
        fail(tensor.name + ": shape " + shape_text(tensor.shape) + ", expected " + shape_text(shape));
}

std::vector<int> Weights::permutation(const std::string& name, int length) {
    const TensorRef& tensor = find(name);
    require_shape(tensor, "vector", {length});
    if (tensor.dtype != DType::I32) fail(name + ": must be int32");
    std::vector<int> out(length);
    std::memcpy(out.data(), view(tensor), tensor.nbytes);
    std::vector<bool> seen(length);
    for (const int i : out) {
        if (i < 0 || i >= length || seen[i]) fail(name + ": is not a permutation");
        seen[i] = true;
    }
    return out;
}

std::vector<float> Weights::vector(const std::string& name, int length) {
    const TensorRef& tensor = find(name);
    require_shape(tensor, "vector", {length});
    const uint8_t* data = view(tensor);
    std::vector<float> out(length);
    for (int i = 0; i < length; ++i) {
        uint16_t half;
        switch (tensor.dtype) {
            case DType::F32:
                std::memcpy(&out[i], data + 4 * i, 4);
                break;
            case DType::F16:
                std::memcpy(&half, data + 2 * i, 2);
                out[i] = f16_to_float(half);
                break;
            case DType::BF16:
                std::memcpy(&half, data + 2 * i, 2);
                out[i] = bf16_to_float(half);
                break;
            case DType::U8:
            case DType::I32:
                fail(name + ": a vector of whole numbers");
        }
    }
    return out;
}

Linear Weights::linear(const std::string& prefix, int n, int k) {
    return std::move(linears(prefix, 1, false, n, k).front());
}

std::vector<Linear> Weights::experts(const std::string& prefix, int count, int n, int k) {
    return linears(prefix, count, true, n, k);
}

std::vector<Linear> Weights::linears(const std::string& prefix, int count, bool stacked, int n, int k) {
    const auto shaped = [&](std::vector<int64_t> shape) {
        if (stacked) shape.insert(shape.begin(), count);
        return shape;
    };
    std::vector<Linear> out(count);
    // Puts expert e's part of a tensor into the field of its linear.
    const auto spread = [&](const TensorRef& tensor, auto field) {
        const uint8_t* data = view(tensor);
        for (int e = 0; e < count; ++e) out[e].*field = data + tensor.nbytes / count * e;
    };
    for (Linear& w : out) {
        w.n = n;
        w.k = k;
    }
    if (tensors_.count(prefix + ".bias")) {
        if (stacked) fail(prefix + ".bias: experts have no bias");
        out[0].bias = vector(prefix + ".bias", n);
    }
    if (!tensors_.count(prefix + ".qweight")) {
        const TensorRef& tensor = find(prefix + ".weight");
        require_shape(tensor, "dense.nk", shaped({n, k}));
        for (Linear& w : out) w.dtype = tensor.dtype;
        spread(tensor, &Linear::dense);
        return out;
    }
    const int n_tiles = ceil_div(n, kTile), k_tiles = ceil_div(k, kTile);
    const TensorRef& codes = find(prefix + ".qweight");
    const bool wide = codes.layout == "w8.n64k64";
    if (wide)
        require_shape(codes, codes.layout, shaped({n_tiles, k_tiles, 4, 8, 2, 64}));
    else
        require_shape(codes, "w4.n64k64", shaped({n_tiles, k_tiles, 4, 32, 16}));
    const TensorRef& scales = find(prefix + ".scales");
    if (scales.shape.size() != (stacked ? 4 : 3)) fail(scales.name + ": shape " + shape_text(scales.shape));
    const int groups = int(scales.shape[scales.shape.size() - 2]);
    require_shape(scales, "group.n64", shaped({n_tiles, groups, kTile}));
    if (groups < 1 || k_tiles * kTile % groups)
        fail(scales.name + ": " + std::to_string(groups) + " groups do not divide K");
    const int group = k_tiles * kTile / groups;
    if (group % 32 || (group != 32 && group % kTile))
        fail(scales.name + ": group " + std::to_string(group) + " is not 32 or a multiple of 64");
    if (scales.dtype != DType::F16 && scales.dtype != DType::BF16)
        fail(scales.name + ": must be float16 or bfloat16");
    for (Linear& w : out) {
        w.dtype = scales.dtype;
        w.bits = wide ? 8 : 4;
        w.k_tiles = k_tiles;
        w.groups = groups;
        w.group = group;
    }
    spread(codes, &Linear::codes);
    spread(scales, &Linear::scales);
    const auto beside = [&](const std::string& kind, auto field) {
        if (!tensors_.count(prefix + kind)) return;
        const TensorRef& tensor = find(prefix + kind);
        require_shape(tensor, "group.n64", shaped({n_tiles, groups, kTile}));
        if (tensor.dtype != scales.dtype) fail(tensor.name + ": dtype differs from the scales'");
        spread(tensor, field);
    };
    beside(".zeros", &Linear::zeros);
    beside(".mins", &Linear::mins);
    if (out[0].zeros && out[0].mins) fail(prefix + ": has both zeros and mins");
    if (tensors_.count(prefix + ".order")) {
        if (stacked) fail(prefix + ".order: experts have no order");
        out[0].order = permutation(prefix + ".order", k);
    }
    return out;
}

}  // namespace turbomill
