#include "kernels/cuda/device_weights.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/error.h"
#include "kernels/cuda/launch.h"
#include "store/expand.h"

namespace turbomill::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr size_t kPiece = size_t(64) << 20;  // elements that are converted at a time

// One tensor to copy: `elements` of `from`, kept as `to`.
struct Copy {
    const void* host;
    DType from, to;
    size_t elements;
    const Linear* expanded = nullptr;  // whose weight in fp32 is copied, in place of what is at `host`
    bool joined = false;               // right behind the copy before it
    size_t offset = 0;

    size_t bytes() const { return elements * dtype_bytes(to); }
};

void require_even(const Linear& w) {
    if (w.k % 2)
        throw std::runtime_error("a quantized linear has K = " + std::to_string(w.k) +
                                 ": the cuda backend needs an even K");
}

// `count` linears, of which `w` is the first: in host memory each of their tensors follows the one before.
void add_linears(const Linear& w, size_t count, DType type, std::vector<Copy>& copies) {
    if (w.dense) {
        copies.push_back({w.dense, w.dtype, type, count * w.n * w.k});
        return;
    }
    require_even(w);
    const size_t tiles = count * ceil_div(w.n, 64), params = tiles * w.groups * 64;
    copies.push_back({w.codes, DType::U8, DType::U8, tiles * w.k_tiles * 512 * w.bits});
    for (const void* values : {w.scales, w.zeros, w.mins})
        if (values) copies.push_back({values, w.dtype, w.dtype, params});
}

void add_expanded(const Linear& w, DType type, bool joined, std::vector<Copy>& copies) {
    copies.push_back({w.codes, DType::F32, type, size_t(w.n) * w.k, &w, joined});
}

void add_single(const Linear& w, DType type, std::vector<Copy>& copies) {
    if (!w.bias.empty()) copies.push_back({w.bias.data(), DType::F32, DType::F32, w.bias.size()});
    if (w.codes && kept(w) == Kept::Dense)
        add_expanded(w, type, false, copies);
    else
        add_linears(w, 1, type, copies);
}

// Experts, which kernels find one behind the other.
void add_stack(const std::vector<Linear>& experts, DType type, std::vector<Copy>& copies) {
    if (experts[0].dense || kept_expert(experts[0]) != Kept::Dense)
        return add_linears(experts[0], experts.size(), type, copies);
    for (const Linear& w : experts) add_expanded(w, type, &w != &experts[0], copies);
}

}  // namespace

Kept kept(const Linear& w) {
    if (w.dense || !w.order.empty()) return Kept::Dense;
    if (w.bits == 8) return Kept::W8;
    return w.mins || w.looked_up ? Kept::Dense : Kept::W4;
}

Kept kept_expert(const Linear& w) {
    return kept(w) == Kept::W4 ? Kept::W4 : Kept::Dense;
}

DType activation_type(const Weights& weights) {
    if (weights.embedding.dtype != DType::F32) return weights.embedding.dtype;
    DType type = DType::F32;
    const auto take = [&](const Linear& w) {
        if (w.codes && type == DType::F32) type = w.dtype;
    };
    weights.each_single(take);
    weights.each_stack([&](const std::vector<Linear>& experts) { take(experts[0]); });
    return type;
}

DeviceWeights::DeviceWeights(const Weights& weights, DType type, cudaStream_t stream) {
    std::vector<Copy> copies;
    weights.each_single([&](const Linear& w) {
        add_single(w, type, copies);
        const size_t elements = size_t(w.n) * w.k;
        if (kept(w) == Kept::W8 &&
            !w8_fused_fits(type, w.dtype == DType::BF16, w.mins, w.k, w.group, w.groups))
            largest_w8_ = std::max(largest_w8_, elements);
        if (kept(w) == Kept::W4 && !w4_fused_fits(type, w.dtype == DType::BF16, w.k, w.group, w.groups))
            largest_unfused_ = std::max(largest_unfused_, elements);
    });
    weights.each_stack([&](const std::vector<Linear>& experts) { add_stack(experts, type, copies); });
    weights.each_vector([&](const std::vector<float>& v) {
        if (!v.empty()) copies.push_back({v.data(), DType::F32, DType::F32, v.size()});
    });
    size_t total = 0, staging = 0;
    for (auto& copy : copies) {
        if (addresses_.count(copy.host)) continue;  // a tied embedding, say
        addresses_.emplace(copy.host, nullptr);
        if (!copy.joined) total = (total + kAlign - 1) / kAlign * kAlign;
        copy.offset = total;
        total += copy.bytes();
        if (copy.from != copy.to)
            staging = std::max(staging, std::min(copy.elements, kPiece) * dtype_bytes(copy.from));
    }
    memory_ =
        DeviceMemory(total, "the model's weights", "use a model with fewer bits per weight, or a larger GPU");
    const DeviceMemory source(staging, "a weight's conversion",
                              "use a model with fewer bits per weight, or a larger GPU");
    std::vector<float> values;
    for (const auto& copy : copies) {
        const void*& address = addresses_[copy.host];
        if (address) continue;
        uint8_t* target = memory_.as<uint8_t>() + copy.offset;
        address = target;
        if (copy.expanded) {
            check(cudaStreamSynchronize(stream), "copying weights");  // `values` is still being read
            values = expand(*copy.expanded);
        }
        const auto* host = static_cast<const uint8_t*>(copy.expanded ? values.data() : copy.host);
        const bool converts = copy.from != copy.to;
        const size_t piece = converts ? kPiece : copy.elements;
        for (size_t done = 0; done < copy.elements; done += piece) {
            const size_t count = std::min(piece, copy.elements - done);
            uint8_t* to = target + done * dtype_bytes(copy.to);
            check(cudaMemcpyAsync(converts ? source.as<uint8_t>() : to, host + done * dtype_bytes(copy.from),
                                  count * dtype_bytes(copy.from), cudaMemcpyHostToDevice, stream),
                  "copying weights");
            if (converts) convert(copy.from, source.as(), copy.to, to, int64_t(count), stream);
        }
    }
    check(cudaStreamSynchronize(stream), "copying weights");
}

const void* DeviceWeights::at(const void* host) const {
    const auto it = addresses_.find(host);
    if (it == addresses_.end()) throw std::logic_error("a weight was not copied to the device");
    return it->second;
}

}  // namespace turbomill::cuda
