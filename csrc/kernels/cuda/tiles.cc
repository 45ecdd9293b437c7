#include "kernels/cuda/tiles.h"

#include <algorithm>

#include "core/types.h"

namespace turbomill::cuda {
namespace {

constexpr int kKeys = 64;                // keys that a kernel takes at once
constexpr int kFewestKeys = 256;         // of a part: fewer are not worth a merge
constexpr int kFewestUnits = 4;          // of a block of attention_decode, likewise
constexpr int kWaves = 1;                // of attention_decode's blocks
constexpr int kBlocksPerProcessor = 12;  // several waves, so that the last one is short beside the rest

}  // namespace

TilePlanner::TilePlanner(const ModelConfig& model, AttentionKernels kernels, int bits, int multiprocessors)
    : group_(model.group()),
      kv_heads_(model.num_kv_heads),
      kernels_(kernels),
      bits_(bits),
      multiprocessors_(multiprocessors),
      target_(ceil_div(kBlocksPerProcessor * multiprocessors, kv_heads_)),
      // Parts have at least total / target keys, so fewer than `target` tiles have several, and these have at
      // most `target` parts and one more each.
      slots_(kernels == AttentionKernels::Tensor ? 2 * size_t(target_) + 2 : 0) {}

size_t TilePlanner::most_tiles(size_t slices, size_t tokens) const {
    return slices + tokens * group_ / kQueryRows + slots_;
}

void TilePlanner::plan(const BatchData& batch, int padding) {
    decodes.clear();
    prompts.clear();
    entries.clear();
    ranges.clear();
    most_rows = 0;
    int units = 0, block_offset = 0, first_row = 0;
    int64_t total = 0;  // keys of all decodes
    for (const auto& slice : batch.slices)
        if (slice.length * group_ <= kQueryRows) total += slice.context + slice.length;
    const int most = std::max(kFewestKeys, ceil_div(int(ceil_div(int(total), target_)), kKeys) * kKeys);
    int slot = 0;
    for (int i = 0; i < int(batch.slices.size()); ++i) {
        const Slice& slice = batch.slices[i];
        const int rows = slice.length * group_, keys = slice.context + slice.length;
        const int row = first_row, blocks = block_offset;
        first_row += slice.length;
        block_offset += int(slice.blocks.size());
        if (kernels_ == AttentionKernels::Any) {
            for (int first = 0; first < rows; first += kQueryRows)
                decodes.push_back({i, first, 0, keys, 0, 0, 1});
        } else if (rows > kQueryRows) {
            for (int first = 0; first < rows; first += kPromptRows)
                prompts.push_back({i, first, 0, keys, 0, 0, 1});
        } else if (kernels_ == AttentionKernels::Decode) {
            entries.push_back({units, slice.context, slice.length, row, blocks});
            units += ceil_div(keys, kDecodeUnit);
            most_rows = std::max(most_rows, rows);
        } else {
            const int wanted = ceil_div(keys, most), size = ceil_div(ceil_div(keys, wanted), kKeys) * kKeys;
            const int parts = ceil_div(keys, size);
            for (int part = 0; part < parts; ++part)
                decodes.push_back({i, 0, part * size, std::min(keys, (part + 1) * size), slot, part, parts});
            if (parts > 1) slot += parts;
        }
    }
    if (entries.empty()) return;
    entries.resize(entries.size() + padding + 1, {units, 0, 0, 0, 0});
    cut_ranges();
}

void TilePlanner::cut_ranges() {
    const int units = entries.back().first_unit, total = units * kv_heads_;
    const int blocks = multiprocessors_ * decode_blocks(bits_, most_rows) * kWaves;
    const int share = std::max({kFewestUnits, ceil_div(total, blocks), units / kMostDecodeParts});
    int head = 0, entry = 0;
    for (int block = 0; block < blocks; ++block) {
        const int begin = block * share, end = std::min(total, begin + share);
        if (begin >= end) {
            ranges.push_back({});
            continue;
        }
        const auto pair_end = [&] { return head * units + entries[entry + 1].first_unit; };
        while (pair_end() <= begin)
            if (++entry + 1 == int(entries.size())) entry = 0, ++head;
        ranges.push_back({begin, end, share, head, entry, head * units + entries[entry].first_unit,
                          pair_end(), entries[entry]});
    }
}

}  // namespace turbomill::cuda
