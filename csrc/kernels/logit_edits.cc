#include "kernels/logit_edits.h"

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
    const auto& bits = *rules.allowed;
    for (int i = 0; i < vocab; ++i)
        if (!(bits[i / 32] >> (i % 32) & 1) && std::isfinite(logits[i])) logits[i] = kDisallowedLogit;
}

}  // namespace turbomill
