#include "kernels/cuda/w4_plan.h"

#include <algorithm>

namespace turbomill::cuda {
namespace {

struct Measured {
    int n, k, rows;
    W4Plan plan;
};

// By shape, then by rows; `make tune-gpu` writes it.
constexpr Measured kMeasured[] = {
#include "kernels/cuda/w4_plans_sm90a.inc"
};

constexpr int kMostSplits = 8;

int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

// Rough clocks of a product, fitted to the measured shapes: what a thread block takes for a tile of 64 of K,
// bound by its own pace or by the multiprocessor's share of the tensor cores and of the memory, times its tiles;
// and the price of splitting K, which is an exchange of sums.
double clocks(const W4Plan& plan, int n, int k, int rows, int multiprocessors) {
    const auto [groups, tokens, blocks] = plan.kernel;
    const int tiles = ceil_div(n, 64 * groups) * ceil_div(rows, tokens) * plan.splits;
    const int shared = std::min(blocks, ceil_div(tiles, multiprocessors));  // blocks on one multiprocessor
    const int rounds = ceil_div(tiles, multiprocessors * shared);
    const double tensor = 2.2 * tokens * groups, memory = 120.0 * groups + 4.5 * tokens;
    const double pace = std::max({350.0, shared * tensor, shared * memory});
    return rounds * (double(ceil_div(k, 64)) / plan.splits * pace + 1500.0 + 10.0 * tokens) +
           (plan.splits > 1 ? 1500.0 + 0.1 * tokens * 64 * groups : 0.0);
}

}  // namespace

W4Plan choose_w4_plan(int n, int k, int rows, int multiprocessors) {
    const Measured* best = nullptr;
    for (const auto& entry : kMeasured)
        if (entry.n == n && entry.k == k && (!best || best->rows < rows)) best = &entry;
    if (best) return best->plan;
    W4Plan choice{};
    double least = 0;
    for (const auto& kernel : kW4Kernels) {
        for (int splits = 1; splits <= std::clamp(ceil_div(k, 128), 1, kMostSplits); ++splits) {
            const W4Plan plan{kernel, splits};
            // Split sums are exchanged by blocks that must all run at once.
            const int tiles = ceil_div(n, 64 * kernel.warpgroups) * ceil_div(rows, kernel.tokens);
            if (splits > 1 && tiles * splits > multiprocessors * kernel.blocks) break;
            const double cost = clocks(plan, n, k, rows, multiprocessors);
            if (!choice.splits || cost < least) choice = plan, least = cost;
        }
    }
    return choice;
}

}  // namespace turbomill::cuda
