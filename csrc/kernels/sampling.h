// Choosing a token from one row of logits, on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"

namespace turbomill {

// Of `token` and the `count` likeliest (ties: lowest id first) in a row of logits [vocab]; sums in fp64.
Logprobs logprobs_of(const float* logits, int vocab, int token, int count);

// Added to the greatest logit, in fp32: the lowest that min_p lets pass, p >= min_p * p_max. -inf: all pass.
float min_p_gap(const SamplingParams& params);

// Greedy (ties: lowest id), or temperature, then min-p, then top-k, then top-p, then a draw by an exponential
// race: token i wins when Exp_i / p_i is smallest (the Gumbel-max trick). Exp_i depends on (seed, position,
// i) alone, so a logit's last bit, which may vary with the batch, decides nothing unless two tokens nearly
// tie. Inverting a cumulative sum would let it move every later token's interval.
class Sampler {
  public:
    // Sets memory aside for logits of `vocab` tokens.
    void reserve(int vocab) { candidates_.reserve(vocab); }
    BatchData::Sample sample(const float* logits, int vocab, const SamplingParams& params, uint64_t position);

  private:
    struct Candidate {
        float logit;
        int id;
    };
    // Leaves what min_p lets pass, of it the top-k, of those the smallest set of likeliest candidates whose
    // probability reaches top_p.
    void keep_nucleus(float best_logit, const SamplingParams& params);

    std::vector<Candidate> candidates_;
};

}  // namespace turbomill
