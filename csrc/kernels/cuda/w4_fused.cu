// Launching the fused kernels: the tensor maps of their operands, and whether they fit.
#include <string>

#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/types.cuh"
#include "kernels/cuda/w4_fused.h"

namespace turbomill::cuda {

FusedMaps fused_maps(DType type, const void* x, int rows, const W4View& w, W4Kernel kernel, bool whole) {
    const auto element = map_type(type);
    const int tiles = fused_stage_tiles(kernel), groups = whole ? 1 : tiles * 64 / w.group;
    const cuuint64_t n_tiles = blocks_for(w.n, 64), k = w.k, k_tiles = w.k_tiles, all_groups = w.groups;
    const auto params = [&](const void* data) {
        return make_map<3>(element, data, {64, all_groups, n_tiles}, {128, all_groups * 128},
                           {64, cuuint32_t(groups), cuuint32_t(kernel.block_groups())},
                           CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    FusedMaps maps{};
    maps.x = make_map<2>(element, x, {k, cuuint64_t(rows)}, {k * 2}, {64, cuuint32_t(kernel.tokens)},
                         CU_TENSOR_MAP_SWIZZLE_128B);
    // Bytes by eights: no side of a box may have more than 256 elements.
    maps.codes =
        make_map<3>(CU_TENSOR_MAP_DATA_TYPE_FLOAT64, w.codes, {256, k_tiles, n_tiles}, {2048, k_tiles * 2048},
                    {256, cuuint32_t(tiles), cuuint32_t(kernel.block_groups())}, CU_TENSOR_MAP_SWIZZLE_NONE);
    maps.scales = params(w.scales);
    if (w.zeros) maps.zeros = params(w.zeros);
    return maps;
}

bool w4_fused_fits(DType type, bool bf16_params, int k, int group, int groups) {
    // The copy engine wants rows of x at multiples of 16 bytes; scales meet codes in the type of x; a stage's
    // tiles of K lie in one group, or each in groups of its own.
    if (group != 32 && group != 64 && group % 128 && groups != 1) return false;
    return type != DType::F32 && bf16_params == (type == DType::BF16) && k % 8 == 0 && w4_fused_runs();
}

bool w4_fused_fits(DType type, const W4View& w, const void* x) {
    return w4_fused_fits(type, w.bf16_params, w.k, w.group, w.groups) &&
           reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

void w4_fused(DType type, DType out, const W4View& w, const void* x, const float* bias, void* y, int rows,
              const W4Plan& wanted, int multiprocessors, bool overlap, cudaStream_t stream, bool gated) {
    if (rows == 0) return;
    W4Plan plan = wanted;
    if (plan.kernel.halved() && out == DType::F32) plan.kernel.warpgroups = 4;  // those write 16 bits alone
    FusedJob job{};
    job.w = w;
    job.bias = bias;
    job.y = y;
    job.out_fp32 = out == DType::F32;
    job.gated = gated;
    if (gated && (w.n % 16 || out != type))
        throw std::invalid_argument("w4_fused: gates come by eights, in the type of activations");
    job.rows = rows;
    job.n_blocks = blocks_for(w.n, 64 * plan.kernel.warpgroups);
    job.m_tiles = blocks_for(rows, plan.kernel.tokens);
    job.splits = plan.splits;
    job.direct = plan.splits == 1 && !job.out_fp32;
    if (plan.splits < 1 || plan.splits > plan.kernel.most_splits() || plan.splits > (w.k_tiles + 1) / 2)
        throw std::invalid_argument("w4_fused: K cannot be split into " + std::to_string(plan.splits));
    const bool whole = w.group > 64 || w.groups == 1;
    const FusedMaps maps = fused_maps(type, x, rows, w, plan.kernel, whole);
    with_half_type(type, [&]<class T>() {
        if (!launch_fused<T>(plan, whole, maps, job, multiprocessors, overlap, stream))
            throw std::invalid_argument("w4_fused: no kernel for this plan");
    });
}

}  // namespace turbomill::cuda
