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
    if (!embedding.dense) fail("tok_embeddings.weight: must be dense");
    output = c.tie_word_embeddings ? embedding : linear("output", c.vocab_size, c.hidden_size);
    norm = vector("norm.weight", c.hidden_size);
    rope_inv_freq = vector("rope.inv_freq", c.head_dim / 2);
    layers.reserve(c.num_layers);
    for (int i = 0; i < c.num_layers; ++i) {
        const std::string p = "layers." + std::to_string(i) + ".";
        DecoderLayer layer;
        layer.attention_norm = vector(p + "attention_norm.weight", c.hidden_size);
        layer.ffn_norm = vector(p + "ffn_norm.weight", c.hidden_size);
        layer.qkv = linear(p + "w_qkv", c.qkv_dim(), c.hidden_size);
        layer.o = linear(p + "w_o", c.hidden_size, c.q_dim());
        layer.gate_up = linear(p + "w_gate_up", 2 * c.intermediate_size, c.hidden_size);
        layer.down = linear(p + "w_down", c.hidden_size, c.intermediate_size);
        layers.push_back(std::move(layer));
    }
}

void Weights::each_linear(const std::function<void(const Linear&)>& f) const {
    f(embedding);
    f(output);
    for (const auto& layer : layers)
        for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) f(*w);
}

void Weights::each_vector(const std::function<void(const std::vector<float>&)>& f) const {
    f(norm);
    for (const auto& layer : layers)
        for (const auto* v : {&layer.attention_norm, &layer.ffn_norm}) f(*v);
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
                fail(name + ": a vector of bytes");
        }
    }
    return out;
}

Linear Weights::linear(const std::string& prefix, int n, int k) {
    Linear w;
    w.n = n;
    w.k = k;
    if (tensors_.count(prefix + ".bias")) w.bias = vector(prefix + ".bias", n);
    if (!tensors_.count(prefix + ".qweight")) {
        const TensorRef& tensor = find(prefix + ".weight");
        require_shape(tensor, "dense.nk", {n, k});
        w.dtype = tensor.dtype;
        w.dense = view(tensor);
        return w;
    }
    const int n_tiles = ceil_div(n, kTile);
    w.k_tiles = ceil_div(k, kTile);
    const TensorRef& codes = find(prefix + ".qweight");
    require_shape(codes, "w4.n64k64", {n_tiles, w.k_tiles, 4, 32, 16});
    w.codes = view(codes);
    const TensorRef& scales = find(prefix + ".scales");
    if (scales.shape.size() != 3) fail(scales.name + ": shape " + shape_text(scales.shape));
    w.groups = int(scales.shape[1]);
    require_shape(scales, "group.n64", {n_tiles, w.groups, kTile});
    if (w.groups < 1 || w.k_tiles * kTile % w.groups)
        fail(scales.name + ": " + std::to_string(w.groups) + " groups do not divide K");
    w.group = w.k_tiles * kTile / w.groups;
    if (w.group % 32 || (w.group != 32 && w.group % kTile))
        fail(scales.name + ": group " + std::to_string(w.group) + " is not 32 or a multiple of 64");
    w.dtype = scales.dtype;
    if (w.dtype != DType::F16 && w.dtype != DType::BF16) fail(scales.name + ": must be float16 or bfloat16");
    w.scales = view(scales);
    if (tensors_.count(prefix + ".zeros")) {
        const TensorRef& zeros = find(prefix + ".zeros");
        require_shape(zeros, "group.n64", {n_tiles, w.groups, kTile});
        if (zeros.dtype != w.dtype) fail(zeros.name + ": dtype differs from the scales'");
        w.zeros = view(zeros);
    }
    return w;
}

}  // namespace turbomill
