#include "kernels/cuda/tiles.h"

#include <algorithm>

#include "core/types.h"

namespace turbomill::cuda {
namespace {

constexpr int kKeys = 64;                // keys that a kernel takes at once
constexpr int kFewestKeys = 256;         // of a part: fewer are not worth a merge
constexpr int kFewestUnits = 2;          // of a part in attention_decode, likewise
constexpr int kSmallShare = 8;           // units that are quick enough for evenness not to matter
constexpr int kBlocksPerProcessor = 12;  // several waves, so that the last one is short beside the rest

}  // namespace

TilePlanner::TilePlanner(const ModelConfig& model, AttentionKernels kernels, int policy, int multiprocessors,
                         PromptTiles prompt_tiles)
    : group_(model.group()),
      kv_heads_(model.num_kv_heads),
      head_dim_(model.head_dim),
      kernels_(kernels),
      policy_(policy),
      multiprocessors_(multiprocessors),
      prompt_tiles_(prompt_tiles),
      whole_units_(policy ? 2 : 1),
      target_(ceil_div(kBlocksPerProcessor * multiprocessors, kv_heads_)),
      // Parts have at least total / target keys, so fewer than `target` tiles have several, and these have at
      // most `target` parts and one more each.
      slots_(kernels == AttentionKernels::Tensor ? 2 * size_t(target_) + 2 : 0) {
    for (int layer = 0; layer < std::max(1, model.num_layers); ++layer) {
        const int window = model.window(layer) ? model.window(layer) : kNoWindow;
        const auto same = [&](const DecodePlan& plan) { return plan.window == window; };
        if (std::none_of(decode_plans.begin(), decode_plans.end(), same))
            decode_plans.push_back({window, {}, {}});
    }
}

size_t TilePlanner::most_tiles(size_t slices, size_t tokens) const {
    return slices + tokens * group_ / kQueryRows + slots_;
}

void TilePlanner::plan(const BatchData& batch, int padding) {
    decodes.clear();
    prompts.clear();
    for (DecodePlan& plan : decode_plans) {
        plan.entries.clear();
        plan.ranges.clear();
    }
    prompt_launches.clear();
    most_rows = unpacked_ = 0;
    std::vector<int> units(decode_plans.size(), 0);
    int block_offset = 0, first_row = 0;
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
        if (rows > kQueryRows && prompt_tiles_.rows) {
            cut_prompt(i, rows, slice.context);
        } else if (kernels_ == AttentionKernels::Any) {
            for (int first = 0; first < rows; first += kQueryRows)
                decodes.push_back({i, first, 0, keys, 0, 0, 1});
        } else if (rows > kQueryRows) {
            for (int first = 0; first < rows; first += kPromptRows)
                prompts.push_back({i, first, 0, keys, 0, 0, 1});
        } else if (kernels_ == AttentionKernels::Decode) {
            for (size_t p = 0; p < decode_plans.size(); ++p) {
                const int unseen = std::max(0, slice.context + 1 - decode_plans[p].window),
                          first_key = unseen / kDecodeUnit * kDecodeUnit;
                decode_plans[p].entries.push_back(
                    {units[p], slice.context, slice.length, row, blocks, first_key});
                units[p] += ceil_div(keys - first_key, kDecodeUnit);
            }
            most_rows = std::max(most_rows, rows);
        } else {
            const int wanted = ceil_div(keys, most), size = ceil_div(ceil_div(keys, wanted), kKeys) * kKeys;
            const int parts = ceil_div(keys, size);
            for (int part = 0; part < parts; ++part)
                decodes.push_back({i, 0, part * size, std::min(keys, (part + 1) * size), slot, part, parts});
            if (parts > 1) slot += parts;
        }
    }
    if (prompt_tiles_.rows) end_prompt_launch();
    for (size_t p = 0; p < decode_plans.size(); ++p) {
        DecodePlan& plan = decode_plans[p];
        if (plan.entries.empty()) continue;
        plan.entries.resize(plan.entries.size() + padding + 1, {units[p], 0, 0, 0, 0, 0});
        cut_ranges(plan);
    }
}

void TilePlanner::cut_prompt(int slice, int rows, int context) {
    const int blocks = ceil_div(context + rows / group_, kUnpackedBlock);
    if (prompt_tiles_.unpacked_blocks && unpacked_ + blocks > prompt_tiles_.unpacked_blocks)
        end_prompt_launch();
    const int parts = ceil_div(rows, prompt_tiles_.rows);
    for (int part = 0; part < parts; ++part) {
        const int first = part * prompt_tiles_.rows;
        const int end = context + std::min(rows, first + prompt_tiles_.rows) / group_;
        prompts.push_back({slice, first, 0, end, unpacked_, part, parts});
    }
    unpacked_ += blocks;
}

void TilePlanner::end_prompt_launch() {
    const int first = prompt_launches.empty() ? 0 : prompt_launches.back();
    unpacked_ = 0;
    if (first == int(prompts.size())) return;
    std::stable_sort(prompts.begin() + first, prompts.end(),
                     [](const QueryTile& a, const QueryTile& b) { return a.end > b.end; });
    prompt_launches.push_back(int(prompts.size()));
}

// Two ways to cut. Parts within pairs, one to a block, where that is about as even: a block then has one
// query and one merge. Otherwise equal shares of the whole line.
void TilePlanner::cut_ranges(DecodePlan& plan) const {
    const auto& entries = plan.entries;
    const int blocks = multiprocessors_ * decode_blocks(policy_, most_rows, head_dim_);
    const int units = entries.back().first_unit, total = units * kv_heads_;
    const auto whole = [&](int count) { return ceil_div(count, whole_units_) * whole_units_; };
    const int share =
        whole(std::max({kFewestUnits, ceil_div(total, blocks), ceil_div(units, kMostDecodeParts)}));
    const int most = largest_part(entries, blocks, share);
    if (most > 0) {
        cut_pairs(plan, most, units);
    } else {
        cut_line(plan, share, units, total);
    }
    plan.ranges.resize(blocks, {});
}

// The fewest units that parts may have at most for the pairs' parts to be no more than `blocks`, or 0 when
// that is much more than `share`.
int TilePlanner::largest_part(const std::vector<DecodeEntry>& entries, int blocks, int share) const {
    const int limit = std::max(share + share / 10, kSmallShare);
    for (int most = share; most <= limit; most += whole_units_) {
        int64_t parts = 0;
        for (size_t i = 0; i + 1 < entries.size(); ++i)
            parts += ceil_div(entries[i + 1].first_unit - entries[i].first_unit, most);
        if (parts * kv_heads_ <= blocks) return most;
    }
    return 0;
}

void TilePlanner::cut_pairs(DecodePlan& plan, int most, int units) const {
    const auto& entries = plan.entries;
    auto& ranges = plan.ranges;
    for (int head = 0; head < kv_heads_; ++head) {
        for (int i = 0; i + 1 < int(entries.size()); ++i) {
            const int begin = head * units + entries[i].first_unit,
                      end = head * units + entries[i + 1].first_unit;
            if (begin == end) continue;
            const int wanted = ceil_div(end - begin, most),
                      size = ceil_div(ceil_div(end - begin, wanted), whole_units_) * whole_units_,
                      parts = ceil_div(end - begin, size), first = int(ranges.size());
            for (int at = begin; at < end; at += size)
                ranges.push_back(
                    {at, std::min(end, at + size), head, i, begin, end, 0, first, parts, entries[i]});
        }
    }
}

void TilePlanner::cut_line(DecodePlan& plan, int share, int units, int total) const {
    const auto& entries = plan.entries;
    auto& ranges = plan.ranges;
    int head = 0, entry = 0;
    for (int begin = 0; begin < total; begin += share) {
        const auto pair_end = [&] { return head * units + entries[entry + 1].first_unit; };
        while (pair_end() <= begin)
            if (++entry + 1 == int(entries.size())) entry = 0, ++head;
        ranges.push_back({begin, std::min(total, begin + share), head, entry,
                          head * units + entries[entry].first_unit, pair_end(), share, 0, 0, entries[entry]});
    }
}

}  // namespace turbomill::cuda
