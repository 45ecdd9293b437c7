// Launching W8A16 products in place: the tiles that suit the rows, and how K is split.
#include <algorithm>

#include "kernels/cuda/w8_rows.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kFewestStages = 2;  // that a split of K is worth
constexpr int kBlocksEach = 2;    // of a multiprocessor, that K is split for

template <class T, int Tokens, bool Minima, bool Whole>
void launch(W8Job job, const W4Workspace& workspace, int splits, bool overlap, cudaStream_t stream) {
    using Sizes = W8Sizes<T, Tokens, Whole>;
    const int n_blocks = blocks_for(job.w.n, 128), m_tiles = blocks_for(job.rows, 8 * Tokens);
    const int stages = blocks_for(job.w.k_tiles, Sizes::kTiles);
    if (splits == 0) {
        const int64_t blocks = int64_t(n_blocks) * m_tiles;
        splits = int(std::clamp<int64_t>(kBlocksEach * workspace.multiprocessors / blocks, 1,
                                         std::max(1, stages / kFewestStages)));
    }
    const size_t sums = size_t(job.rows) * n_blocks * 128;
    splits = int(std::min<size_t>(splits, std::max<size_t>(1, workspace.partial_floats / sums)));
    if (int64_t(n_blocks) * m_tiles > workspace.counter_count) splits = 1;
    splits = std::min(splits, workspace.multiprocessors);  // all at once, for they wait for each other
    job.stages_per_split = blocks_for(stages, splits);
    splits = blocks_for(stages, job.stages_per_split);
    const auto kernel = w8_rows_kernel<T, Tokens, Minima, Whole>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sizes::kShared),
          "a kernel's shared memory");
    const dim3 grid(splits, m_tiles, n_blocks);
    if (overlap) {
        launch_overlapped(kernel, grid, Sizes::kThreads, Sizes::kShared, stream, "w8_rows", job);
    } else {
        kernel<<<grid, Sizes::kThreads, Sizes::kShared, stream>>>(job);
        check_launch("w8_rows");
    }
}

// The kernel whose stages have one group where that is so. Minima come in groups of 32.
template <class T, int Tokens>
void launch(const W8Job& job, const W4Workspace& workspace, int splits, bool overlap, cudaStream_t stream) {
    const W8View& w = job.w;
    const bool whole = w.groups == 1 || w.group % (64 * W8Sizes<T, Tokens, true>::kTiles) == 0;
    if (w.mins)
        launch<T, Tokens, true, false>(job, workspace, splits, overlap, stream);
    else if (whole)
        launch<T, Tokens, false, true>(job, workspace, splits, overlap, stream);
    else
        launch<T, Tokens, false, false>(job, workspace, splits, overlap, stream);
}

}  // namespace

bool w8_rows_fits(const W8View& w, const void* x) {
    return w.k % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&  // for copies of 16 bytes
           (w.groups == 1 || int64_t(w.k) * w.group < int64_t(1) << 32);
}

void w8_rows(DType type, DType out, const W8View& w, const void* x, const float* bias, void* y, int rows,
             int splits, const W4Workspace& workspace, bool overlap, cudaStream_t stream) {
    if (rows == 0) return;
    const auto per_group = unsigned(w.groups == 1 ? 0 : ((uint64_t(1) << 32) + w.group - 1) / w.group);
    const W8Job job{
        w, x, bias, y, out == DType::F32, rows, 0, per_group, workspace.partial, workspace.counters};
    // Scales of the other type would lose bits in it: they are applied to sums, at any number of rows.
    const bool same = w.bf16_params == (type == DType::BF16);
    with_half_type(type, [&]<class T>() {
        if (rows <= 8)
            launch<T, 1>(job, workspace, splits, overlap, stream);
        else if (rows <= 16)
            launch<T, 2>(job, workspace, splits, overlap, stream);
        else if (rows <= 32 || !same)
            launch<T, 4>(job, workspace, splits, overlap, stream);
        else if (rows <= 64)
            launch<T, 8>(job, workspace, splits, overlap, stream);
        else
            launch<T, 16>(job, workspace, splits, overlap, stream);
    });
}

}  // namespace turbomill::cuda
