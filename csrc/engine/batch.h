// One step's work, handed from the engine thread to the executor and back. Owned by exactly one of them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/logit_edits.h"

namespace turbomill {

constexpr int kMostLogprobs = 20;  // alternatives that are reported for a token

struct SamplingParams {
    float temperature = 0.f;  // 0: greedy
    int top_k = 0;            // 0: off
    float top_p = 1.f;        // 1: off
    uint64_t seed = 0;
    float min_p = 0.f;         // 0: off
    int logprobs = -1;         // likeliest tokens to report beside the one that is chosen; -1: report nothing
    int prompt_logprobs = -1;  // likewise for each token of the prompt
};

// The consecutive tokens of one sequence that a step computes.
struct Slice {
    uint64_t sequence = 0;
    int slot = 0;                // where the backend keeps this sequence's last sampled token
    int context = 0;             // tokens already in the cache
    int length = 0;              // tokens in this slice
    std::vector<int> tokens;     // [length], or empty: the slot's last sample (length 1)
    std::vector<int> blocks;     // cache blocks that cover context + length tokens
    bool sample = false;         // the last token's logits give the next token
    bool return_logits = false;  // logits of every token of the slice are wanted
    std::vector<int> targets;  // [length]: the token after each of the slice's; empty: nobody asks for their
                               // logprobs, which are of the model's own logits
    SamplingParams sampling;
    std::shared_ptr<const LogitEdits> edits;  // before the sample is drawn; null: none

    // As a new one, but for the memory of its lists.
    void clear() {
        Slice fresh;
        fresh.tokens.swap(tokens);
        fresh.blocks.swap(blocks);
        fresh.targets.swap(targets);
        *this = std::move(fresh);
        tokens.clear();
        blocks.clear();
        targets.clear();
    }
};

// log softmax of the model's logits, at temperature 1 and before any edits.
struct Logprobs {
    float logprob = 0.f;  // of the token itself
    int count = 0;        // of the likeliest tokens, likeliest first:
    std::array<int, kMostLogprobs> ids{};
    std::array<float, kMostLogprobs> values{};
};

// The whole of page `to` becomes what page `from` holds.
struct BlockCopy {
    int from = 0, to = 0;
};

// Used again for later steps, so that a steady state of steps allocates nothing.
struct BatchData {
    int64_t step = 0;  // the plan's number
    std::vector<Slice> slices;
    std::vector<BlockCopy> copies;  // made in this order before the step writes anything

    // Results, filled by the executor.
    struct Sample {
        int token = -1;       // -1: none wanted
        bool finite = true;   // false: the logits held NaN or infinity
        Logprobs logprobs{};  // where wanted
    };
    std::vector<Sample> samples;                  // one per slice
    std::vector<std::vector<float>> logits;       // one per slice: [length, V] where wanted, else empty
    std::vector<std::vector<Logprobs>> logprobs;  // one per slice: [length] where it has targets, else empty
    bool recorded = false;                        // the backend repeated a recorded step
    std::string error;                            // a failed step fails all its sequences

    int tokens() const {
        int total = 0;
        for (const auto& slice : slices) total += slice.length;
        return total;
    }
    // A new slice, at the end.
    Slice& add_slice() {
        if (spare_.empty()) return slices.emplace_back();
        slices.push_back(std::move(spare_.back()));
        spare_.pop_back();
        return slices.back();
    }
    // Without slices and results. Rows of logits and logprobs are large and rare: their memory goes.
    void clear() {
        for (; !slices.empty(); slices.pop_back()) {
            slices.back().clear();
            spare_.push_back(std::move(slices.back()));
        }
        copies.clear();
        samples.clear();
        logits.clear();
        logprobs.clear();
        recorded = false;
        error.clear();
    }

  private:
    std::vector<Slice> spare_;
};

}  // namespace turbomill
