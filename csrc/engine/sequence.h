// A request while the engine works on it. Only the engine thread touches it.
#pragma once

#include <vector>

#include "engine/blocks.h"
#include "engine/request.h"

namespace turbomill {

struct Sequence {
    explicit Sequence(Request r) : request(std::move(r)), tokens(request.token_ids) {}

    Request request;
    std::vector<int> tokens;    // prompt, then what was generated and has arrived
    int scheduled = 0;          // tokens whose keys and values are in the cache or in a step in flight
    int samples_in_flight = 0;  // tokens sampled in steps whose result has not arrived
    int steps_in_flight = 0;    // steps that read this sequence's blocks
    int slot = -1;              // set while it runs
    int logits_delivered = 0;   // prompt positions whose logits the client has
    bool finished = false;      // its last output was sent; it leaves when no step reads its blocks
    std::vector<BlockRef> blocks;

    uint64_t id() const { return request.id; }
    int prompt_length() const { return int(request.token_ids.size()); }
    int generated() const { return int(tokens.size()) - prompt_length(); }
    // Tokens that exist, including those that only the executor knows yet.
    int length() const { return int(tokens.size()) + samples_in_flight; }
    // Whether another token will be wanted after those known and in flight.
    bool wants_sample() const { return generated() + samples_in_flight < request.max_new_tokens; }
    // Tokens to run next: the rest of the prompt, or the newest token if one more sample is wanted.
    int runnable() const {
        if (scheduled < prompt_length()) return length() - scheduled;
        return wants_sample() ? length() - scheduled : 0;
    }
};

}  // namespace turbomill
