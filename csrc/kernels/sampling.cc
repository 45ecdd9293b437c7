#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>

namespace turbomill {
namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser (Steele et al., 2014)
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
    return double(mix(mix(seed) ^ mix(position + 0x632be59bd9b4e019ull)) >> 11) * 0x1.0p-53;
}

BatchData::Sample Sampler::sample(const float* logits, int vocab, const SamplingParams& params,
                                  uint64_t position) {
    int best = 0;
    bool finite = true;
    for (int i = 0; i < vocab; ++i) {
        finite &= std::isfinite(logits[i]);
        if (logits[i] > logits[best]) best = i;
    }
    if (!finite) return {-1, false};
    if (params.temperature <= 0.f || params.top_k == 1) return {best, true};

    const auto greater = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    candidates_.resize(vocab);
    for (int i = 0; i < vocab; ++i) candidates_[i] = {logits[i], i};
    if (params.top_k > 0 && params.top_k < vocab) {
        std::nth_element(candidates_.begin(), candidates_.begin() + params.top_k, candidates_.end(), greater);
        candidates_.resize(params.top_k);
    }
    double total = 0;
    const auto weight = [&](const Candidate& c) {
        return std::exp(double(c.logit - logits[best]) / double(params.temperature));
    };
    for (const auto& c : candidates_) total += weight(c);
    // Walk down from the likeliest, sorting a little at a time: the nucleus is usually short.
    const double u = uniform(params.seed, position);
    const double mass = std::min(1.0, double(params.top_p)) * total;
    size_t sorted = 0;
    const auto at = [&](size_t i) -> const Candidate& {
        if (i >= sorted) {
            const size_t end = std::min(candidates_.size(), std::max<size_t>(64, 2 * sorted));
            std::partial_sort(candidates_.begin() + sorted, candidates_.begin() + end, candidates_.end(),
                              greater);
            sorted = end;
        }
        return candidates_[i];
    };
    double kept = 0;  // mass of the smallest prefix that reaches top_p
    size_t count = 0;
    while (count < candidates_.size() && (count == 0 || kept < mass)) kept += weight(at(count++));
    double running = 0;
    for (size_t i = 0; i < count; ++i) {
        running += weight(at(i));
        if (u * kept < running) return {at(i).id, true};
    }
    return {at(count - 1).id, true};
}

}  // namespace turbomill
