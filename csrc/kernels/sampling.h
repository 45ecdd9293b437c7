// Choosing a token from one row of logits, on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"

namespace turbomill {

// Greedy (ties: lowest id), or temperature, then top-k, then top-p, then one uniform draw.
// The draw depends only on (seed, position): the same request gives the same text in any batch.
class Sampler {
  public:
    BatchData::Sample sample(const float* logits, int vocab, const SamplingParams& params, uint64_t position);

  private:
    struct Candidate {
        float logit;
        int id;
    };
    std::vector<Candidate> candidates_;
};

// Uniform in [0, 1), a pure function of its arguments.
double uniform(uint64_t seed, uint64_t position);

}  // namespace turbomill
