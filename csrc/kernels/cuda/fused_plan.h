// How the fused kernels of sm_90a cut a product up, and which of them does it fastest.
#pragma once

#include <span>

namespace turbomill::cuda {

// Tokens up to which a kernel's warps multiply each for itself, with mma; with more by warpgroups, with
// wgmma.
constexpr int kMostByWarps = 16;

// A kernel: blocks of 64 * warpgroups rows of N by tiles of `tokens` tokens; `blocks` thread blocks share a
// multiprocessor. Of 7 warpgroups, two thread blocks have the rows, 3.5 times 64 each: of the middle one's,
// each has half of the tokens.
struct FusedKernel {
    int warpgroups, tokens, blocks;

    constexpr bool halved() const { return warpgroups == 7; }
    constexpr int block_groups() const { return halved() ? 4 : warpgroups; }  // of a thread block
    constexpr int thread_blocks() const { return halved() ? 2 : 1; }
    constexpr bool by_warps() const { return tokens <= kMostByWarps; }
    constexpr int most_splits() const { return halved() ? 1 : 8; }
    bool operator==(const FusedKernel&) const = default;
};

// Every kernel that there is for codes of 4 and of 8 bits. Two blocks to a multiprocessor where their
// registers and shared memory fit: the next kernel's first block can then start while this one's last ends.
inline constexpr FusedKernel kW4Kernels[] = {
    {2, 8, 2},  {3, 8, 2},   {4, 8, 2},   {4, 8, 1},   {2, 16, 2},  {3, 16, 2},
    {4, 16, 1}, {2, 32, 2},  {3, 32, 1},  {4, 32, 1},  {2, 64, 2},  {3, 64, 1},
    {4, 64, 1}, {2, 128, 1}, {3, 128, 1}, {4, 128, 1}, {2, 256, 1}, {7, 128, 1},
};
inline constexpr FusedKernel kW8Kernels[] = {
    {2, 8, 2},  {4, 8, 1},   {2, 16, 2},  {2, 32, 2},  {3, 32, 1},  {2, 64, 2},  {3, 64, 1},
    {4, 64, 1}, {2, 128, 1}, {3, 128, 1}, {4, 128, 1}, {2, 256, 1}, {7, 128, 1},
};
constexpr std::span<const FusedKernel> fused_kernels(int bits) {
    return bits == 4 ? std::span<const FusedKernel>(kW4Kernels) : std::span<const FusedKernel>(kW8Kernels);
}

struct FusedPlan {
    FusedKernel kernel;
    int splits;  // thread blocks that share K: 1 to the kernel's most_splits
};

// Whether launches overlap when they may: of many rows, overlapping ones were measured to be slower.
constexpr bool fused_overlaps(int rows, bool may) {
    return may && rows <= 1024;
}

// For y [rows, N] = x [rows, K] w^T, w of 4 or 8 bits: as measured where the table has the shape, else by
// estimate. `overlap`: for launches that may begin before the kernel before them is done, where room for both
// counts.
FusedPlan choose_fused_plan(int bits, int n, int k, int rows, int multiprocessors, bool overlap);

}  // namespace turbomill::cuda
