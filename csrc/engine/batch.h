// One step's work, handed from the engine thread to the executor and back. Owned by exactly one of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace turbomill {

struct SamplingParams {
    float temperature = 0.f;  // 0: greedy
    int top_k = 0;            // 0: off
    float top_p = 1.f;        // 1: off
    uint64_t seed = 0;
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
    SamplingParams sampling;
};

// The whole of page `to` becomes what page `from` holds.
struct BlockCopy {
    int from = 0, to = 0;
};

struct BatchData {
    int64_t step = 0;  // the plan's number
    std::vector<Slice> slices;
    std::vector<BlockCopy> copies;  // made in this order before the step writes anything

    // Results, filled by the executor.
    struct Sample {
        int token = -1;      // -1: none wanted
        bool finite = true;  // false: the logits held NaN or infinity
    };
    std::vector<Sample> samples;             // one per slice
    std::vector<std::vector<float>> logits;  // one per slice: [length, V] where wanted, else empty
    bool recorded = false;                   // the backend repeated a recorded step
    std::string error;                       // a failed step fails all its sequences

    int tokens() const {
        int total = 0;
        for (const auto& slice : slices) total += slice.length;
        return total;
    }
};

}  // namespace turbomill
