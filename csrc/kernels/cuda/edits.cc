#include "kernels/cuda/edits.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/error.h"

namespace turbomill::cuda {
namespace {

constexpr size_t kLeastBytes = 1 << 16;

size_t aligned(size_t bytes) {
    return (bytes + 15) / 16 * 16;
}

}  // namespace

void EditInputs::send(const BatchData& batch, const std::vector<int>& sampled, cudaStream_t stream) {
    view_ = {};
    std::vector<EditRow> rows;
    size_t edits = 0, bans = 0, masks = 0, words = 0;
    for (int i = 0; i < int(sampled.size()); ++i) {
        const Slice& slice = batch.slices[sampled[i]];
        if (!slice.edits) continue;
        const LogitEdits& e = *slice.edits;
        rows.push_back({i, slice.slot, int(edits), int(e.edits.size()), int(bans), int(e.bans.size()),
                        e.allowed ? int(masks++) : -1, int(e.last_unknown), e.repetition, e.presence,
                        e.frequency});
        edits += e.edits.size();
        bans += e.bans.size();
        if (e.allowed) words = e.allowed->size();
    }
    if (rows.empty()) return;
    const size_t edits_at = aligned(sizeof(EditRow) * rows.size());
    const size_t bans_at = edits_at + aligned(sizeof(LogitEdit) * edits);
    const size_t masks_at = bans_at + aligned(sizeof(AfterLast) * bans);
    const size_t bytes = masks_at + aligned(4 * words * masks);

    side_ ^= 1;
    if (device_.bytes() < bytes)
        device_ =
            DeviceMemory(std::max(kLeastBytes, 2 * bytes), "a step's logit edits", "lower max_batch_size");
    if (host_.empty())
        for (int i = 0; i < 2; ++i) host_.emplace_back(host_bytes_[i] = kLeastBytes);
    if (host_bytes_[side_] < bytes) {
        host_[side_] = PinnedMemory(2 * bytes);
        host_bytes_[side_] = 2 * bytes;
    }
    uint8_t* host = host_[side_].as<uint8_t>();
    std::copy(rows.begin(), rows.end(), reinterpret_cast<EditRow*>(host));
    auto* edit = reinterpret_cast<LogitEdit*>(host + edits_at);
    auto* ban = reinterpret_cast<AfterLast*>(host + bans_at);
    auto* mask = reinterpret_cast<uint32_t*>(host + masks_at);
    for (const EditRow& row : rows) {
        const LogitEdits& e = *batch.slices[sampled[row.row]].edits;
        edit = std::copy(e.edits.begin(), e.edits.end(), edit);
        ban = std::copy(e.bans.begin(), e.bans.end(), ban);
        if (e.allowed) mask = std::copy(e.allowed->begin(), e.allowed->end(), mask);
    }
    check(cudaMemcpyAsync(device_.as(), host, bytes, cudaMemcpyHostToDevice, stream),
          "sending a step's logit edits");
    const uint8_t* device = device_.as<uint8_t>();
    view_ = {int(rows.size()), reinterpret_cast<const EditRow*>(device),
             reinterpret_cast<const LogitEdit*>(device + edits_at),
             reinterpret_cast<const AfterLast*>(device + bans_at),
             reinterpret_cast<const uint32_t*>(device + masks_at)};
}

}  // namespace turbomill::cuda
