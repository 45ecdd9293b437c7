// A request while the engine works on it. Only the engine thread touches it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/blocks.h"
#include "engine/request.h"

namespace turbomill {

struct Sequence {
    explicit Sequence(Request r) : request(std::move(r)), tokens(request.token_ids) {}

    Request request;
    std::vector<int> tokens;    // prompt, then what was generated and has arrived
    int scheduled = 0;          // tokens whose keys and values are in the cache or in a step in flight
    int recorded = 0;           // of those, the ones that other sequences can find
    int samples_in_flight = 0;  // tokens sampled in steps whose result has not arrived
    int steps_in_flight = 0;    // steps that read this sequence's blocks
    int slot = -1;              // set while it runs
    int rows_delivered = 0;     // prompt positions whose logits, or logprobs, the client has
    int cached_tokens = -1;     // prompt tokens that were found in the cache when it first ran; -1: not yet
    int64_t reused_at = -1;     // the step at whose planning it took blocks, or rows, of other sequences
    bool finished = false;      // its last output was sent; it leaves when no step reads its blocks
    std::vector<LogicalBlock*> blocks;
    std::unique_ptr<LogitRules> rules;  // null: none
    int allowed_at = -1;  // guided: the rules know what may follow so many generated tokens; -1: not yet

    uint64_t id() const { return request.id; }
    int prompt_length() const { return int(request.token_ids.size()); }
    int generated() const { return int(tokens.size()) - prompt_length(); }
    // Tokens that exist, including those that only the executor knows yet.
    int length() const { return int(tokens.size()) + samples_in_flight; }
    // Whether another token will be wanted after those known and in flight.
    bool wants_sample() const { return generated() + samples_in_flight < request.max_new_tokens; }
    // Whether logits, or logprobs, of the prompt are still owed to the client.
    bool owes_rows() const {
        return (request.return_logits || request.sampling.prompt_logprobs >= 0) &&
               rows_delivered < prompt_length();
    }
    // Whether the next sample may be drawn: a guided one's mask has come.
    bool ready() const { return !request.guided || allowed_at == generated() + samples_in_flight; }
    // Tokens to run next: the rest of the prompt, or the newest token if one more sample is wanted.
    int runnable() const {
        if (!ready()) return 0;
        if (scheduled < prompt_length()) return length() - scheduled;
        return wants_sample() ? length() - scheduled : 0;
    }
    // The most tokens that it need not run itself: the last one gives the next token's logits.
    int reusable() const {
        const int most = int(tokens.size()) - 1;
        return owes_rows() ? std::min(most, rows_delivered) : most;
    }
};

// Who is served first: the lower `priority`, then who came first.
struct ByUrgency {
    bool operator()(const Sequence* a, const Sequence* b) const {
        if (a->request.priority != b->request.priority) return a->request.priority < b->request.priority;
        return a->id() < b->id();
    }
};

}  // namespace turbomill
