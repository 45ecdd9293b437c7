// Launching the fused kernels over experts.
#include "kernels/cuda/moe_launch.h"
#include "kernels/cuda/types.cuh"
#include "kernels/cuda/w4_grouped.h"

namespace turbomill::cuda {
namespace {

// Tiles of half as many tokens again as experts have in the mean, so that few of them need two and have their
// weights read twice; with any, every distribution is right.
FusedKernel choose_grouped(const ExpertRows& rows) {
    for (const FusedKernel& kernel : kGroupedKernels)
        if (1.5 * rows.rows <= double(kernel.tokens) * rows.experts) return kernel;
    return kGroupedKernels[std::size(kGroupedKernels) - 1];
}

}  // namespace

void grouped_w4_fused(DType type, const W4View& w, const void* x, void* y, const ExpertRows& rows,
                      int multiprocessors, bool gated, cudaStream_t stream) {
    if (rows.rows == 0) return;
    if (gated && w.n % 16) throw std::invalid_argument("grouped_w4_fused: gates come by eights");
    const FusedKernel kernel = choose_grouped(rows);
    const bool whole = w.group > 64 || w.groups == 1;
    GroupedJob job{};
    job.fused.w = w;
    job.fused.y = y;
    job.fused.gated = gated;
    job.fused.rows = rows.rows;
    job.fused.n_blocks = blocks_for(w.n, 64 * kernel.warpgroups);
    job.fused.splits = 1;
    job.fused.direct = true;
    job.offsets = rows.offsets;
    job.experts = rows.experts;
    W4View all = w;
    all.n = blocks_for(w.n, 64) * 64 * rows.experts;
    const FusedMaps maps = fused_maps(4, type, x, rows.rows, all, kernel, whole);
    with_half_type(type, [&]<class T>() {
        if (!launch_grouped<T>(kernel, whole, maps, job, multiprocessors, stream))
            throw std::invalid_argument("grouped_w4_fused: no kernel for this tile");
    });
}

}  // namespace turbomill::cuda
