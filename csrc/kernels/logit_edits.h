// What a request does to a row of logits before its token is chosen: penalties, biases, bans. Every backend
// makes the same edits with the same roundings.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace turbomill {

// Logits of tokens that must not be chosen: not infinite, which would mean a broken model. A banned token is
// chosen when every allowed one is banned; one that is not allowed never is.
constexpr float kBannedLogit = -1e30f;
constexpr float kDisallowedLogit = -3e38f;

struct LogitEdit {
    int token = 0;
    int count = 0;  // how often it was generated
    float bias = 0.f;
    bool seen = false;  // in the prompt, or generated
    bool banned = false;
};

struct AfterLast {
    int last = 0, token = 0;  // `token` is banned when the last sample is `last`
};

// Applied in this order: `edits`, `bans`, `allowed`.
struct LogitEdits {
    float repetition = 1.f;  // seen tokens: a positive logit is divided by it, a negative one multiplied
    float presence = 0.f;    // subtracted from tokens that were generated
    float frequency = 0.f;   // likewise, times how often
    // The slot's last sample has not reached the engine: it counts as seen and generated once more.
    bool last_unknown = false;
    std::vector<LogitEdit> edits;  // at most one a token
    std::vector<AfterLast> bans;
    std::shared_ptr<const std::vector<uint32_t>>
        allowed;  // [ceil(V / 32)] a bit for each token; null: all are
};

// logits [vocab], in place; what is not finite stays. `last`: the slot's last sample, for last_unknown and
// bans.
void edit_logits(const LogitEdits& edits, int last, int vocab, float* logits);

}  // namespace turbomill
