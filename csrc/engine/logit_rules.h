// A request's rules for its tokens, and what the engine knows of the text they depend on.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/logit_edits.h"

namespace turbomill {

// As a client gives them.
struct LogitRuleFields {
    float repetition_penalty = 1.f;
    float presence_penalty = 0.f;
    float frequency_penalty = 0.f;
    std::vector<int> logit_bias_ids;
    std::vector<float> logit_biases;          // as many
    int min_new_tokens = 0;                   // until then no stop token is chosen
    std::vector<std::vector<int>> bad_words;  // token sequences that are never completed
    std::vector<int> allowed_token_ids;       // empty: all
    bool any(const std::vector<int>& stop_ids) const;
    // Throws std::invalid_argument that names the field.
    void validate(int vocab) const;
};

class LogitRules {
  public:
    LogitRules(const LogitRuleFields& fields, const std::vector<int>& stop_ids, int vocab);

    // The edits for the token after `tokens` [prompt, generated], of which `unknown` (0 or 1) more have been
    // sampled but not arrived.
    std::shared_ptr<const LogitEdits> edits(const std::vector<int>& tokens, int prompt_length, int unknown);

    // From now on only these tokens may be chosen: [ceil(V / 32)] a bit for each.
    void allow(std::shared_ptr<const std::vector<uint32_t>> allowed) { allowed_ = std::move(allowed); }

  private:
    LogitEdit& entry(int token);
    void note_new(const std::vector<int>& tokens, int prompt_length);
    void ban_words(const std::vector<int>& tokens, int unknown, LogitEdits& out) const;

    const LogitRuleFields fields_;
    const std::vector<int> stop_ids_;
    const bool penalties_;
    std::shared_ptr<const std::vector<uint32_t>> allowed_;
    std::vector<LogitEdit> entries_;      // biases, and with penalties the tokens seen
    std::unordered_map<int, int> index_;  // token -> its entry
    int noted_ = 0;                       // tokens that are in entries_
};

}  // namespace turbomill
