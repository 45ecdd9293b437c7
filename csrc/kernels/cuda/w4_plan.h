// How the fused W4A16 kernels of sm_90a cut a product up, and which of them does it fastest.
#pragma once

namespace turbomill::cuda {

// A kernel: blocks of 64 * warpgroups rows of N by tiles of `tokens` tokens; `blocks` thread blocks share a
// multiprocessor.
struct W4Kernel {
    int warpgroups, tokens, blocks;

    bool operator==(const W4Kernel&) const = default;
};

// Every kernel that there is. Two blocks to a multiprocessor where their registers and shared memory fit: the
// next kernel's first block can then start while this one's last ends.
inline constexpr W4Kernel kW4Kernels[] = {
    {2, 8, 2},  {3, 8, 2},   {4, 8, 2},   {4, 8, 1},   {2, 16, 2},  {3, 16, 2},
    {4, 16, 1}, {2, 32, 2},  {3, 32, 1},  {4, 32, 1},  {2, 64, 2},  {3, 64, 1},
    {4, 64, 1}, {2, 128, 1}, {3, 128, 1}, {4, 128, 1}, {2, 256, 1},
};

// Whether there is a kernel of that size for equal shares of all tiles' K.
constexpr bool w4_stripes(W4Kernel kernel) {
    return kernel.tokens == 32 || kernel.tokens == 128 || kernel == W4Kernel{2, 16, 2};
}

struct W4Plan {
    W4Kernel kernel;
    int splits;       // thread blocks of a cluster that share K: 1 to 8
    int stripes = 0;  // instead: thread blocks of a multiprocessor, all of which share all tiles' K equally

    bool operator==(const W4Plan&) const = default;
};

// For y [rows, N] = x [rows, K] w^T: as measured where the table has the shape, else by estimate. `overlap`:
// for launches that may begin before the kernel before them is done, where room for both counts.
W4Plan choose_w4_plan(int n, int k, int rows, int multiprocessors, bool overlap);

}  // namespace turbomill::cuda
