#include "kernels/logit_edits.h"

#include <algorithm>
#include <cmath>

namespace turbomill {
namespace {

float edited(float logit, const LogitEdits& rules, const LogitEdit& edit) {
    if (edit.seen) logit = logit > 0.f ? logit / rules.repetition : logit * rules.repetition;
    if (edit.count > 0) {
        logit -= rules.presence;
        const float repeated = rules.frequency * float(edit.count);
        logit -= repeated;
    }
    logit += edit.bias;
    return edit.banned ? kBannedLogit : logit;
}

}  // namespace

void edit_logits(const LogitEdits& rules, int last, int vocab, float* logits) {
    const auto apply = [&](const LogitEdit& edit) {
        float& logit = logits[edit.token];
        if (std::isfinite(logit)) logit = edited(logit, rules, edit);
    };
    bool counted = !rules.last_unknown;
    for (LogitEdit edit : rules.edits) {
        if (rules.last_unknown && edit.token == last) {
            ++edit.count;
            edit.seen = counted = true;
        }
        apply(edit);
    }
    if (!counted) apply({last, 1, 0.f, true, false});
    for (const AfterLast& ban : rules.bans)
        if (ban.last == last && std::isfinite(logits[ban.token])) logits[ban.token] = kBannedLogit;
    if (!rules.allowed) return;
    for (int first = 0; first < vocab; first += 32) {
        const uint32_t bits = (*rules.allowed)[first / 32];
        if (bits == ~0u) continue;
        for (int i = first; i < std::min(first + 32, vocab); ++i)
            if (!(bits >> (i - first) & 1) && std::isfinite(logits[i])) logits[i] = kDisallowedLogit;
    }
}

}  // namespace turbomill
