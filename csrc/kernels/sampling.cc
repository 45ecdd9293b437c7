#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace turbomill {
namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser (Steele et al., 2014)
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The running winner of an exponential race over tokens with weights exp(logit / temperature).
class Race {
  public:
    Race(const SamplingParams& params, uint64_t position)
        : stream_(mix(mix(params.seed) ^ mix(position + 0x632be59bd9b4e019ull))),
          inverse_(1.0 / params.temperature) {}

    void enter(float logit, int id) {
        // v is uniform in (0, 1); the token's arrival time is -log(1 - v) / weight.
        const double v = double((mix(stream_ + uint64_t(id)) >> 11) + 1) * 0x1.0p-53;
        const double energy = double(logit) * inverse_;
        // -log(1 - v) >= v: almost every loser is told by v's binary exponent, without a logarithm.
        if (winner_ >= 0 && double(std::ilogb(v)) * 0.6931471805599453 > energy - best_) return;
        const double key = energy - std::log(-std::log1p(-std::min(v, 1.0 - 0x1.0p-53)));
        if (winner_ < 0 || key > best_ || (key == best_ && id < winner_)) {
            best_ = key;
            winner_ = id;
        }
    }
    int winner() const { return winner_; }

  private:
    uint64_t stream_;
    double inverse_;
    double best_ = 0;
    int winner_ = -1;
};

}  // namespace

float min_p_gap(const SamplingParams& params) {
    if (params.min_p <= 0.f) return -std::numeric_limits<float>::infinity();
    return float(double(params.temperature) * std::log(double(params.min_p)));
}

Logprobs logprobs_of(const float* logits, int vocab, int token, int count) {
    float best = logits[0];
    for (int i = 1; i < vocab; ++i) best = std::max(best, logits[i]);
    double sum = 0;
    for (int i = 0; i < vocab; ++i) sum += std::exp(double(logits[i] - best));
    const double log_sum = double(best) + std::log(sum);
    Logprobs out;
    if (token >= 0) out.logprob = float(double(logits[token]) - log_sum);
    count = std::min(count, vocab);
    const auto less_likely = [&](int a, int b) {
        return logits[a] != logits[b] ? logits[a] < logits[b] : a > b;
    };
    for (int i = 0; i < vocab && count > 0; ++i) {
        int place = out.count;
        if (place == count && less_likely(i, out.ids[place - 1])) continue;
        if (place == count) --place;
        for (; place > 0 && less_likely(out.ids[place - 1], i); --place) out.ids[place] = out.ids[place - 1];
        out.ids[place] = i;
        out.count = std::min(out.count + 1, count);
    }
    for (int i = 0; i < out.count; ++i) out.values[i] = float(double(logits[out.ids[i]]) - log_sum);
    return out;
}

void Sampler::keep_nucleus(float best_logit, const SamplingParams& params) {
    const float least = best_logit + min_p_gap(params);
    std::erase_if(candidates_, [&](const Candidate& c) { return c.logit < least; });
    const auto greater = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    if (params.top_k > 0 && params.top_k < int(candidates_.size())) {
        std::nth_element(candidates_.begin(), candidates_.begin() + params.top_k, candidates_.end(), greater);
        candidates_.resize(params.top_k);
    }
    if (params.top_p >= 1.f) return;
    const auto weight = [&](const Candidate& c) {
        return std::exp(double(c.logit - best_logit) / double(params.temperature));
    };
    double total = 0;
    for (const auto& c : candidates_) total += weight(c);
    // Sort from the likeliest down, a little at a time: the nucleus is usually short.
    double kept = 0;
    size_t count = 0, sorted = 0;
    while (count < candidates_.size() && kept < double(params.top_p) * total) {
        if (count == sorted) {
            const size_t end = std::min(candidates_.size(), std::max<size_t>(64, 2 * sorted));
            std::partial_sort(candidates_.begin() + sorted, candidates_.begin() + end, candidates_.end(),
                              greater);
            sorted = end;
        }
        kept += weight(candidates_[count++]);
    }
    candidates_.resize(std::max<size_t>(count, 1));
}

BatchData::Sample Sampler::sample(const float* logits, int vocab, const SamplingParams& params,
                                  uint64_t position) {
    int best = 0;
    bool finite = true;
    for (int i = 0; i < vocab; ++i) {
        finite &= std::isfinite(logits[i]);
        if (logits[i] > logits[best]) best = i;
    }
    if (!finite) return {-1, false, {}};
    if (params.temperature <= 0.f || params.top_k == 1) return {best, true, {}};

    Race race(params, position);
    race.enter(logits[best], best);  // a high bar from the start
    if (params.top_k <= 0 && params.top_p >= 1.f && params.min_p <= 0.f) {
        for (int i = 0; i < vocab; ++i) race.enter(logits[i], i);
        return {race.winner(), true, {}};
    }
    candidates_.resize(vocab);
    for (int i = 0; i < vocab; ++i) candidates_[i] = {logits[i], i};
    keep_nucleus(logits[best], params);
    for (const auto& c : candidates_) race.enter(c.logit, c.id);
    return {race.winner(), true, {}};
}

}  // namespace turbomill
