// A request as Python makes it.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/request.h"

namespace turbomill::python {

struct RequestFields {
#define TM_REQUEST_FIELDS(X)                        \
    X(std::vector<int>, token_ids, {})              \
    X(int, max_new_tokens, 0)                       \
    X(float, temperature, 0.f)                      \
    X(int, top_k, 0)                                \
    X(float, top_p, 1.f)                            \
    X(float, min_p, 0.f)                            \
    X(uint64_t, seed, 0)                            \
    X(int, logprobs, -1)                            \
    X(int, prompt_logprobs, -1)                     \
    X(std::vector<int>, stop_token_ids, {})         \
    X(bool, return_logits, false)                   \
    X(int, priority, 0)                             \
    X(float, repetition_penalty, 1.f)               \
    X(float, presence_penalty, 0.f)                 \
    X(float, frequency_penalty, 0.f)                \
    X(std::vector<int>, logit_bias_ids, {})         \
    X(std::vector<float>, logit_biases, {})         \
    X(int, min_new_tokens, 0)                       \
    X(std::vector<std::vector<int>>, bad_words, {}) \
    X(std::vector<int>, allowed_token_ids, {})      \
    X(bool, guided, false)
#define TM_DECLARE_FIELD(type, name, value) type name = value;
    TM_REQUEST_FIELDS(TM_DECLARE_FIELD)
#undef TM_DECLARE_FIELD

    Request request() const {
        Request r;
        r.token_ids = token_ids;
        r.max_new_tokens = max_new_tokens;
        r.sampling = {temperature, top_k, top_p, seed, min_p, logprobs, prompt_logprobs};
        r.stop_token_ids = stop_token_ids;
        r.return_logits = return_logits;
        r.priority = priority;
        r.guided = guided;
        r.rules = {repetition_penalty, presence_penalty, frequency_penalty, logit_bias_ids,
                   logit_biases,       min_new_tokens,   bad_words,         allowed_token_ids};
        return r;
    }
};

}  // namespace turbomill::python
