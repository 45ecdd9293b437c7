// What clients hand in and what they get back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/logit_rules.h"

namespace turbomill {

struct Request {
    uint64_t id = 0;  // given by the gateway
    std::vector<int> token_ids;
    int max_new_tokens = 0;  // 0: only run the prompt
    SamplingParams sampling;
    std::vector<int> stop_token_ids;
    bool return_logits = false;  // logits of every prompt position
    int priority = 0;            // lower goes first
    LogitRuleFields rules;
    bool guided = false;  // every token waits for a TokenMask
};

// The tokens that may come next in a guided request.
struct TokenMask {
    uint64_t id = 0;   // of the request
    int position = 0;  // tokens that were generated before
    // [ceil(V / 32)] a bit for each token; null: none may, and the text ends.
    std::shared_ptr<const std::vector<uint32_t>> allowed;
};

enum class Finish { None, Stop, Length, Cancelled, Error };

inline const char* finish_name(Finish finish) {
    switch (finish) {
        case Finish::None:
            return "";
        case Finish::Stop:
            return "stop";
        case Finish::Length:
            return "length";
        case Finish::Cancelled:
            return "cancelled";
        case Finish::Error:
            return "error";
    }
    return "";
}

// What one step gave one request.
struct Output {
    uint64_t id = 0;
    int token = -1;  // that was generated; -1: none
    Finish finish = Finish::None;
    std::string error;
    std::shared_ptr<std::vector<float>> logits;  // [rows, V], or null; shared with whoever reads it
    int logits_rows = 0;
    std::vector<Logprobs> logprobs;         // of the token, where wanted
    std::vector<Logprobs> prompt_logprobs;  // of the next prompt tokens from the second on, where wanted
    int cached_tokens = 0;                  // prompt tokens that the prefix cache had
};

// A snapshot of the scheduler and the pools. Of prompt_tokens, cached_tokens were not computed. A block is
// free, cached (evicted when it is needed), or used. stalled_seconds: since a step last began or ended while
// one is in flight, or since something has waited for the engine thread; a busy engine stays below a step's
// length.
#define TM_METRICS_FIELDS(X)        \
    X(int64_t, waiting, 0)          \
    X(int64_t, running, 0)          \
    X(int64_t, total_blocks, 0)     \
    X(int64_t, free_blocks, 0)      \
    X(int64_t, cached_blocks, 0)    \
    X(int64_t, steps, 0)            \
    X(int64_t, recorded_steps, 0)   \
    X(int64_t, prompt_tokens, 0)    \
    X(int64_t, cached_tokens, 0)    \
    X(int64_t, generated_tokens, 0) \
    X(int64_t, preemptions, 0)      \
    X(int64_t, evictions, 0)        \
    X(int64_t, steps_in_flight, 0)  \
    X(double, stalled_seconds, 0.)  \
    X(bool, paused, false)          \
    X(bool, healthy, true)

struct Metrics {
#define TM_DECLARE_FIELD(type, name, value) type name = value;
    TM_METRICS_FIELDS(TM_DECLARE_FIELD)
#undef TM_DECLARE_FIELD
};

}  // namespace turbomill
