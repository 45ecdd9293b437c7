// A mixture of experts on the CPU: each expert's rows are gathered, run through its linears, and added back.
#pragma once

#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/linear.h"
#include "store/weights.h"

namespace turbomill::cpu {

class MoeRunner {
  public:
    MoeRunner(const ModelConfig& model, const Kernels& kernels, LinearRunner& linear, ThreadPool& pool)
        : model_(model), k_(kernels), linear_(linear), pool_(pool) {}

    // y [rows, H] = the weighted sum of each row's experts for x [rows, H]
    void operator()(const Moe& moe, const float* x, int rows, float* y);

  private:
    struct Routed {
        int row;
        float weight;
    };

    // Fills rows_of_ from the router's logits.
    void route(const Moe& moe, const float* x, int rows);
    // y[row] += weight * down(silu(gate) * up) for the rows of `routed`; `inter` is the expert's I
    void add_expert(const Linear& gate_up, const Linear& down, int inter, const std::vector<Routed>& routed,
                    const float* x, float* y);

    const ModelConfig& model_;
    const Kernels& k_;
    LinearRunner& linear_;
    ThreadPool& pool_;
    std::vector<std::vector<Routed>> rows_of_;              // [E]
    std::vector<Routed> all_;                               // [T] of the shared expert
    std::vector<int> order_;                                // [E] the likeliest experts of a row first
    std::vector<float> logits_;                             // [T, E]
    std::vector<float> gathered_, gate_up_, hidden_, out_;  // [t, H], [t, 2 I], [t, I], [t, H]
};

}  // namespace turbomill::cpu
