#include "kernels/cuda/step.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/types.h"
#include "kernels/cuda/error.h"
#include "kernels/sampling.h"

namespace turbomill::cuda {
namespace {

constexpr size_t kAlign = 16;

size_t aligned(size_t bytes) {
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

// The most bytes that a step's inputs take.
size_t most_bytes(const EngineConfig& config, const TilePlanner& planner) {
    const size_t tokens = config.max_step_tokens();
    // A sequence that just finished may still be in flight while its successor starts: twice the batch.
    const size_t slices = std::min<size_t>(2 * size_t(config.max_batch_size), tokens);
    const size_t blocks = slices * ceil_div(config.session_len, config.block_len);
    const size_t tiles = planner.most_tiles(slices, tokens);
    return aligned(4 * tokens) * 3 + aligned(sizeof(SliceInfo) * slices) + aligned(4 * blocks) +
           planner.decode_plans.size() * (aligned(sizeof(DecodeRange) * planner.most_ranges()) +
                                          aligned(sizeof(DecodeEntry) * (slices + 1))) +
           aligned(sizeof(QueryTile) * tiles) + aligned(4 * slices) + aligned(sizeof(SampleInfo) * slices);
}

}  // namespace

StepInputs::StepInputs(const EngineConfig& config, TilePlanner planner, int spare_slot)
    : planner_(std::move(planner)),
      capacity_(most_bytes(config, planner_)),
      device_(capacity_, "a step's inputs", "lower max_batch_size or session_len"),
      host_{PinnedMemory(capacity_), PinnedMemory(capacity_)},
      spare_slot_(spare_slot) {}

void StepInputs::send(const BatchData& batch, int padding, cudaStream_t stream) {
    tokens = batch.tokens() + padding;
    planner_.plan(batch, padding);
    decode_tiles = int(planner_.decodes.size());
    prompt_tiles = int(planner_.prompts.size());
    decode_entries = std::max(0, int(planner_.decode_plans.front().entries.size()) - 1);
    decode_rows = planner_.most_rows;
    first_rows.clear();
    sampled.clear();
    wants_logprobs = false;
    size_t block_count = 0;
    for (int i = 0; i < int(batch.slices.size()); ++i) {
        const Slice& slice = batch.slices[i];
        block_count += slice.blocks.size();
        if (slice.sample) sampled.push_back(i);
        wants_logprobs = wants_logprobs || (slice.sample && slice.sampling.logprobs >= 0);
    }
    sample_count = int(sampled.size()) + padding;
    size_t used = 0;
    const auto take = [&](size_t bytes) {
        const size_t offset = used;
        used += aligned(bytes);
        return offset;
    };
    ids_ = take(4 * size_t(tokens));
    positions_ = take(4 * size_t(tokens));
    row_slice_ = take(4 * size_t(tokens));
    slices_ = take(sizeof(SliceInfo) * (batch.slices.size() + padding));
    plans_.clear();
    for (const DecodePlan& plan : planner_.decode_plans) {
        const size_t ranges = take(sizeof(DecodeRange) * plan.ranges.size());
        plans_.push_back({ranges, take(sizeof(DecodeEntry) * plan.entries.size())});
    }
    tiles_ = take(sizeof(QueryTile) * size_t(decode_tiles + prompt_tiles));
    sampled_rows_ = take(4 * size_t(sample_count));
    samples_ = take(sizeof(SampleInfo) * size_t(sample_count));
    blocks_ = take(4 * block_count);  // last: the only length that recorded steps do not share
    if (used > capacity_) throw std::logic_error("a step is larger than the configuration allows");

    side_ ^= 1;
    const auto host = [&]<class T>(T*, size_t offset) {
        return reinterpret_cast<T*>(host_[side_].as<uint8_t>() + offset);
    };
    int* ids = host((int*)nullptr, ids_);
    int* positions = host((int*)nullptr, positions_);
    int* row_slice = host((int*)nullptr, row_slice_);
    SliceInfo* slices = host((SliceInfo*)nullptr, slices_);
    int* blocks = host((int*)nullptr, blocks_);
    QueryTile* tiles = host((QueryTile*)nullptr, tiles_);
    int* sampled_rows = host((int*)nullptr, sampled_rows_);
    SampleInfo* samples = host((SampleInfo*)nullptr, samples_);
    int row = 0, block_offset = 0, sample = 0;
    for (int i = 0; i < int(batch.slices.size()); ++i) {
        const Slice& slice = batch.slices[i];
        first_rows.push_back(row);
        slices[i] = {slice.context, slice.length, row, block_offset};
        for (int t = 0; t < slice.length; ++t, ++row) {
            ids[row] = slice.tokens.empty() ? -1 - slice.slot : slice.tokens[t];
            positions[row] = slice.context + t;
            row_slice[row] = i;
        }
        for (const int block : slice.blocks) blocks[block_offset++] = block;
        if (!slice.sample) continue;
        const SamplingParams& s = slice.sampling;
        sampled_rows[sample] = row - 1;
        samples[sample++] = {s.seed,        uint64_t(slice.context + slice.length),
                             s.temperature, s.top_p,
                             s.top_k,       slice.slot,
                             min_p_gap(s),  s.logprobs};
    }
    for (int i = 0; i < padding; ++i, ++row, ++sample) {
        ids[row] = positions[row] = 0;
        row_slice[row] = -1;
        slices[batch.slices.size() + i] = {0, 0, row, 0};
        sampled_rows[sample] = row;
        samples[sample] = {0, 0, 0.f, 1.f, 0, spare_slot_, 0.f, -1};
    }
    for (size_t p = 0; p < plans_.size(); ++p) {
        const DecodePlan& plan = planner_.decode_plans[p];
        std::copy(plan.ranges.begin(), plan.ranges.end(), host((DecodeRange*)nullptr, plans_[p].ranges));
        std::copy(plan.entries.begin(), plan.entries.end(), host((DecodeEntry*)nullptr, plans_[p].entries));
    }
    std::copy(planner_.decodes.begin(), planner_.decodes.end(), tiles);
    std::copy(planner_.prompts.begin(), planner_.prompts.end(), tiles + decode_tiles);
    check(cudaMemcpyAsync(device_.as(), host_[side_].as(), used, cudaMemcpyHostToDevice, stream),
          "sending a step's inputs");
}

StepInputs::DecodeWork StepInputs::decode_work(int window) const {
    size_t p = 0;
    while (planner_.decode_plans[p].window != window) ++p;
    return {at<DecodeRange>(plans_[p].ranges), at<DecodeEntry>(plans_[p].entries),
            int(planner_.decode_plans[p].ranges.size())};
}

}  // namespace turbomill::cuda
