#include "kernels/cuda/fused_plan.h"

#include <algorithm>

namespace turbomill::cuda {
namespace {

struct Measured {
    int bits, n, k, rows;
    bool overlap;
    FusedPlan plan;
};

// By shape, then by rows; `make tune-gpu` writes it.
constexpr Measured kMeasured[] = {
#include "kernels/cuda/fused_plans_sm90a.inc"
};

int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

// Clusters of `size` thread blocks that run at once. A cluster lies within one of the GPU's groups of
// multiprocessors, and these are not all of one size: on the H200 that was measured, clusters of 4, 5, 6, 7
// and 8 fitted as if they were these.
int room(int multiprocessors, int blocks, int size) {
    constexpr int kH200[] = {18, 18, 18, 18, 16, 16, 16, 12};
    constexpr int kUsual = 16;
    if (size == 1) return multiprocessors * blocks;
    int clusters = 0;
    if (multiprocessors == 132) {
        for (const int group : kH200) clusters += group * blocks / size;
    } else {
        clusters =
            multiprocessors / kUsual * (kUsual * blocks / size) + multiprocessors % kUsual * blocks / size;
    }
    return std::max(1, clusters);
}

// What a plan takes, in about clocks. A thread block's step of 64 of K is bound by its own pace, by its
// multiprocessor's tensor cores and copies, or by the memory that all share; a round of thread blocks has a
// price of its own, and so has adding up a split K. The numbers were fitted to the times of every plan at the
// four shapes of a Llama-3-8B layer on an H200. Those of 4 bits (2026-11-30): of kernels before they shed a
// tenth of their instructions; of today's times, the choice is within 2 % of the best plan in the mean,
// within 12 % at worst. Those of 8 bits (2026-12-01): within 1 and, overlapping, 2 %, 11 and 16 % at worst.
struct Prices {
    double pace, pace_token, tensor, copy_rows, copy_token, round, round_sum, split, split_sum, memory;
};
constexpr Prices kApart{295, 1.96, 2.13, 51.3, 3.98, 3140, 25.5, 3650, 1.52, 2.19};
constexpr Prices kOverlapping{534, 0.928, 0.753, 165, 2.45, 1450, 27.1, 4240, 0.0125, 1.57};
// Of 8 bits, fitted to a sweep of these kernels (2026-12-01): within 1 and 2 % in the mean, 11 and 16 % at
// worst.
constexpr Prices kBytesApart{304, 5.26, 3.85, 114, 7.64, 13600, 4.73, 6070, 2.34, 2.46};
constexpr Prices kBytesOverlapping{504, 2.11, 2.5, 133, 3.97, 0, 13.6, 8000, 1.53, 1.63};

const Prices& prices(int bits, bool overlap) {
    if (bits == 8) return overlap ? kBytesOverlapping : kBytesApart;
    return overlap ? kOverlapping : kApart;
}

double clocks(const Prices& p, const FusedPlan& plan, int n, int k, int rows, int multiprocessors) {
    const auto [warpgroups, tokens, blocks] = plan.kernel;
    const double groups = double(warpgroups) / plan.kernel.thread_blocks(), sums = tokens * groups;
    const int clusters = ceil_div(n, 64 * warpgroups) * plan.kernel.thread_blocks() * ceil_div(rows, tokens);
    const int most = room(multiprocessors, blocks, plan.splits);
    const int running = std::min(clusters, most) * plan.splits;
    const double shared = std::max(1.0, double(running) / multiprocessors);  // blocks on a multiprocessor
    const double pace =
        std::max({p.pace + p.pace_token * tokens, shared * p.tensor * sums,
                  shared * (p.copy_rows * groups + p.copy_token * tokens), p.memory * groups * running});
    return ceil_div(clusters, most) *
               (double(ceil_div(k, 64)) / plan.splits * pace + p.round + p.round_sum * sums) +
           (plan.splits > 1 ? p.split + p.split_sum * sums : 0.0);
}

}  // namespace

FusedPlan choose_fused_plan(int bits, int n, int k, int rows, int multiprocessors, bool overlap) {
    const Measured* measured = nullptr;
    for (const auto& entry : kMeasured)
        if (entry.bits == bits && entry.n == n && entry.k == k && entry.overlap == overlap &&
            (!measured || measured->rows < rows))
            measured = &entry;
    if (measured) return measured->plan;
    FusedPlan choice{};
    double least = 0;
    for (const auto& kernel : fused_kernels(bits)) {
        if (kernel.tokens >= 2 * std::max(rows, 8)) continue;  // half of it would be idle
        if (kernel.by_warps() && rows > kMostByWarps) continue;
        for (int splits = 1; splits <= std::clamp(ceil_div(k, 128), 1, kernel.most_splits()); ++splits) {
            const FusedPlan plan{kernel, splits};
            const double cost = clocks(prices(bits, overlap), plan, n, k, rows, multiprocessors);
            if (!choice.splits || cost < least) choice = plan, least = cost;
        }
    }
    return choice;
}

}  // namespace turbomill::cuda
