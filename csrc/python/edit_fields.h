// LogitEdits from what the tests' bindings of both backends take.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/logit_edits.h"

namespace turbomill::python {

using EditFields = std::tuple<int, int, float, bool, bool>;  // token, count, bias, seen, banned

inline LogitEdits logit_edits(float repetition, float presence, float frequency,
                              const std::vector<EditFields>& edits,
                              const std::vector<std::pair<int, int>>& bans, const std::vector<int>& allowed,
                              bool last_unknown, int vocab) {
    LogitEdits rules{repetition, presence, frequency, last_unknown, {}, {}, nullptr};
    for (const auto& [token, count, bias, seen, banned] : edits)
        rules.edits.push_back({token, count, bias, seen, banned});
    for (const auto& [last, token] : bans) rules.bans.push_back({last, token});
    if (allowed.empty()) return rules;
    std::vector<uint32_t> bits((vocab + 31) / 32, 0);
    for (const int id : allowed) bits[id / 32] |= 1u << (id % 32);
    rules.allowed = std::make_shared<const std::vector<uint32_t>>(std::move(bits));
    return rules;
}

}  // namespace turbomill::python
