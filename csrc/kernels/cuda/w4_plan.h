// How the fused W4A16 kernels of sm_90a cut a product up, and which of them does it fastest.
#pragma once

namespace turbomill::cuda {

// A kernel: blocks of 64 * warpgroups rows of N by tiles of `tokens` tokens; `blocks` thread blocks share a
// multiprocessor. Of 7 warpgroups, two thread blocks have the rows, 3.5 times 64 each: of the middle one's,
// each has half of the tokens.
struct W4Kernel {
    int warpgroups, tokens, blocks;

    constexpr bool halved() const { return warpgroups == 7; }
    constexpr int block_groups() const { return halved() ? 4 : warpgroups; }  // of a thread block
    constexpr int thread_blocks() const { return halved() ? 2 : 1; }
    constexpr int most_splits() const { return halved() ? 1 : 8; }
    bool operator==(const W4Kernel&) const = default;
};

// Every kernel that there is. Two blocks to a multiprocessor where their registers and shared memory fit: the
// next kernel's first block can then start while this one's last ends.
inline constexpr W4Kernel kW4Kernels[] = {
    {2, 8, 2},  {3, 8, 2},   {4, 8, 2},   {4, 8, 1},   {2, 16, 2},  {3, 16, 2},
    {4, 16, 1}, {2, 32, 2},  {3, 32, 1},  {4, 32, 1},  {2, 64, 2},  {3, 64, 1},
    {4, 64, 1}, {2, 128, 1}, {3, 128, 1}, {4, 128, 1}, {2, 256, 1}, {7, 128, 1},
};

struct W4Plan {
    W4Kernel kernel;
    int splits;  // thread blocks that share K: 1 to the kernel's most_splits
};

// Whether launches overlap when they may: of many rows, overlapping ones were measured to be slower.
constexpr bool w4_overlaps(int rows, bool may) {
    return may && rows <= 1024;
}

// For y [rows, N] = x [rows, K] w^T: as measured where the table has the shape, else by estimate. `overlap`:
// for launches that may begin before the kernel before them is done, where room for both counts.
W4Plan choose_w4_plan(int n, int k, int rows, int multiprocessors, bool overlap);

}  // namespace turbomill::cuda
