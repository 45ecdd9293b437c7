#include "engine/logit_rules.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "core/types.h"

namespace turbomill {
namespace {

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

void require_tokens(const std::vector<int>& ids, int vocab, const char* name) {
    for (const int id : ids)
        require(id >= 0 && id < vocab, std::string(name) + ": token id " + std::to_string(id) +
                                           " is outside the vocabulary of " + std::to_string(vocab));
}

}  // namespace

bool LogitRuleFields::any(const std::vector<int>& stop_ids) const {
    return repetition_penalty != 1.f || presence_penalty != 0.f || frequency_penalty != 0.f ||
           !logit_bias_ids.empty() || (min_new_tokens > 0 && !stop_ids.empty()) || !bad_words.empty() ||
           !allowed_token_ids.empty();
}

void LogitRuleFields::validate(int vocab) const {
    require(repetition_penalty >= 0.01f && repetition_penalty <= 100.f,
            "repetition_penalty must be between 0.01 and 100");
    require(std::abs(presence_penalty) <= 100.f, "presence_penalty must be between -100 and 100");
    require(std::abs(frequency_penalty) <= 100.f, "frequency_penalty must be between -100 and 100");
    require(logit_bias_ids.size() == logit_biases.size(), "logit_bias: as many values as token ids");
    require_tokens(logit_bias_ids, vocab, "logit_bias");
    for (const float bias : logit_biases)
        require(std::abs(bias) <= 100.f, "logit_bias must be between -100 and 100");
    require(min_new_tokens >= 0, "min_new_tokens must not be negative");
    for (const auto& word : bad_words) {
        require(!word.empty(), "bad_words: a word without tokens");
        require_tokens(word, vocab, "bad_words");
    }
    require_tokens(allowed_token_ids, vocab, "allowed_token_ids");
}

LogitRules::LogitRules(const LogitRuleFields& fields, const std::vector<int>& stop_ids, int vocab)
    : fields_(fields),
      stop_ids_(stop_ids),
      penalties_(fields.repetition_penalty != 1.f || fields.presence_penalty != 0.f ||
                 fields.frequency_penalty != 0.f) {
    for (size_t i = 0; i < fields_.logit_bias_ids.size(); ++i)
        entry(fields_.logit_bias_ids[i]).bias = fields_.logit_biases[i];
    if (fields_.allowed_token_ids.empty()) return;
    std::vector<uint32_t> bits(ceil_div(vocab, 32), 0);
    for (const int id : fields_.allowed_token_ids) bits[id / 32] |= 1u << (id % 32);
    allowed_ = std::make_shared<const std::vector<uint32_t>>(std::move(bits));
}

LogitEdit& LogitRules::entry(int token) {
    const auto [place, added] = index_.try_emplace(token, int(entries_.size()));
    if (added) entries_.push_back({token, 0, 0.f, false, false});
    return entries_[place->second];
}

void LogitRules::note_new(const std::vector<int>& tokens, int prompt_length) {
    for (; noted_ < int(tokens.size()); ++noted_) {
        LogitEdit& seen = entry(tokens[noted_]);
        seen.seen = true;
        seen.count += noted_ >= prompt_length;
    }
}

void LogitRules::ban_words(const std::vector<int>& tokens, int unknown, LogitEdits& out) const {
    for (const auto& word : fields_.bad_words) {
        // What must precede its last token: known tokens, then the unknown one.
        const int before = int(word.size()) - 1, known = std::max(0, before - unknown);
        if (known > int(tokens.size()) || !std::equal(tokens.end() - known, tokens.end(), word.begin()))
            continue;
        if (before > 0 && unknown) {
            out.bans.push_back({word[before - 1], word.back()});
            continue;
        }
        const auto it = std::find_if(out.edits.begin(), out.edits.end(),
                                     [&](const LogitEdit& edit) { return edit.token == word.back(); });
        if (it != out.edits.end()) {
            it->banned = true;
        } else {
            out.edits.push_back({word.back(), 0, 0.f, false, true});
        }
    }
}

std::shared_ptr<const LogitEdits> LogitRules::edits(const std::vector<int>& tokens, int prompt_length,
                                                    int unknown) {
    if (penalties_) note_new(tokens, prompt_length);
    auto out = std::make_shared<LogitEdits>();
    out->repetition = fields_.repetition_penalty;
    out->presence = fields_.presence_penalty;
    out->frequency = fields_.frequency_penalty;
    out->last_unknown = penalties_ && unknown > 0;
    out->edits = entries_;
    out->allowed = allowed_;
    const int generated = int(tokens.size()) - prompt_length + unknown;
    if (generated < fields_.min_new_tokens) {
        for (const int id : stop_ids_) {
            const auto place = index_.find(id);
            if (place != index_.end()) {
                out->edits[place->second].banned = true;
            } else {
                out->edits.push_back({id, 0, 0.f, false, true});
            }
        }
    }
    ban_words(tokens, unknown, *out);
    if (out->edits.empty() && out->bans.empty() && !out->allowed && !out->last_unknown) return nullptr;
    return out;
}

}  // namespace turbomill
