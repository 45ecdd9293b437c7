// Launching the fused kernels: the tensor maps of their operands, and whether they fit.
#include <string>

#include "kernels/cuda/fused_linear.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

CUtensorMap codes_map(int bits, const PackedView& w, cuuint32_t tiles, cuuint32_t warpgroups) {
    const cuuint64_t n_tiles = blocks_for(w.n, 64), k_tiles = w.k_tiles;
    if (bits == 4)  // bytes by eights: no side of a box may have more than 256 elements
        return make_map<3>(CU_TENSOR_MAP_DATA_TYPE_FLOAT64, w.codes, {256, k_tiles, n_tiles},
                           {2048, k_tiles * 2048}, {256, tiles, warpgroups}, CU_TENSOR_MAP_SWIZZLE_NONE);
    // Of a sub-tile's eight pairs of rows, the even ones, then the odd ones: CodeTile<8>.
    return make_map<5>(CU_TENSOR_MAP_DATA_TYPE_UINT8, w.codes, {128, 4, 2, 4 * k_tiles, n_tiles},
                       {256, 128, 1024, k_tiles * 4096}, {128, 4, 2, 4 * tiles, warpgroups},
                       CU_TENSOR_MAP_SWIZZLE_128B);
}

// Whether no stage of a ring has more than one group of scales.
bool is_whole(const PackedView& w) {
    return w.group > 64 || w.groups == 1;
}

bool fits(DType type, bool bf16_params, int k, int group, int groups) {
    // The copy engine wants rows of x at multiples of 16 bytes; scales meet codes in the type of x; a stage's
    // tiles of K lie in one group, or each in groups of its own.
    if (group != 32 && group != 64 && group % 128 && groups != 1) return false;
    return type != DType::F32 && bf16_params == (type == DType::BF16) && k % 8 == 0 && w4_fused_runs();
}

bool aligned(const void* x) {
    return reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

// `minima`: w.zeros are minima.
void fused(int bits, DType type, DType out, const PackedView& w, bool minima, const void* x,
           const float* bias, void* y, int rows, const FusedPlan& wanted, int multiprocessors, bool overlap,
           cudaStream_t stream, bool gated) {
    if (rows == 0) return;
    FusedPlan plan = wanted;
    if (plan.kernel.halved() && out == DType::F32) plan.kernel.warpgroups = 4;  // those write 16 bits alone
    FusedJob job{};
    job.w = w;
    job.bias = bias;
    job.y = y;
    job.out_fp32 = out == DType::F32;
    job.gated = gated;
    if (gated && (w.n % 16 || out != type))
        throw std::invalid_argument("fused linear: gates come by eights, in the type of activations");
    job.rows = rows;
    job.n_blocks = blocks_for(w.n, 64 * plan.kernel.warpgroups);
    job.m_tiles = blocks_for(rows, plan.kernel.tokens);
    job.splits = plan.splits;
    job.direct = plan.splits == 1 && !job.out_fp32;
    job.minima = minima;
    if (plan.splits < 1 || plan.splits > plan.kernel.most_splits() || plan.splits > (w.k_tiles + 1) / 2)
        throw std::invalid_argument("fused linear: K cannot be split into " + std::to_string(plan.splits));
    const bool whole = is_whole(w);
    if (minima && (whole || plan.kernel.by_warps()))
        throw std::invalid_argument("fused linear: no kernel of this plan takes minima");
    const FusedMaps maps = fused_maps(bits, type, x, rows, w, plan.kernel, whole);
    with_half_type(type, [&]<class T>() {
        const auto launch = bits == 4 ? launch_fused<4, T> : launch_fused<8, T>;
        if (!launch(plan, whole, maps, job, multiprocessors, overlap, stream))
            throw std::invalid_argument("fused linear: no kernel for this plan");
    });
}

}  // namespace

FusedMaps fused_maps(int bits, DType type, const void* x, int rows, const PackedView& w, FusedKernel kernel,
                     bool whole) {
    const auto element = map_type(type);
    const int tiles = fused_stage_tiles(kernel), groups = whole ? 1 : tiles * 64 / w.group;
    const cuuint64_t n_tiles = blocks_for(w.n, 64), k = w.k, all_groups = w.groups;
    const auto params = [&](const void* data) {
        return make_map<3>(element, data, {64, all_groups, n_tiles}, {128, all_groups * 128},
                           {64, cuuint32_t(groups), cuuint32_t(kernel.block_groups())},
                           CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    FusedMaps maps{};
    maps.x = make_map<2>(element, x, {k, cuuint64_t(rows)}, {k * 2}, {64, cuuint32_t(kernel.tokens)},
                         CU_TENSOR_MAP_SWIZZLE_128B);
    maps.codes = codes_map(bits, w, tiles, kernel.block_groups());
    maps.scales = params(w.scales);
    if (w.zeros) maps.zeros = params(w.zeros);
    return maps;
}

bool w4_fused_fits(DType type, bool bf16_params, int k, int group, int groups) {
    return fits(type, bf16_params, k, group, groups);
}

bool w4_fused_fits(DType type, const W4View& w, const void* x) {
    return fits(type, w.bf16_params, w.k, w.group, w.groups) && aligned(x);
}

bool w8_fused_fits(DType type, bool bf16_params, bool minima, int k, int group, int groups) {
    return !minima && fits(type, bf16_params, k, group, groups);
}

bool w8_fused_fits(DType type, const W8View& w, const void* x, int rows) {
    if (w.mins && (is_whole(w) || rows <= kMostByWarps)) return false;
    return fits(type, w.bf16_params, w.k, w.group, w.groups) && aligned(x);
}

void w4_fused(DType type, DType out, const W4View& w, const void* x, const float* bias, void* y, int rows,
              const FusedPlan& plan, int multiprocessors, bool overlap, cudaStream_t stream, bool gated) {
    fused(4, type, out, w, false, x, bias, y, rows, plan, multiprocessors, overlap, stream, gated);
}

void w8_fused(DType type, DType out, const W8View& w, const void* x, const float* bias, void* y, int rows,
              const FusedPlan& plan, int multiprocessors, bool overlap, cudaStream_t stream, bool gated) {
    PackedView view = w;
    if (w.mins) view.zeros = w.mins;
    fused(8, type, out, view, w.mins, x, bias, y, rows, plan, multiprocessors, overlap, stream, gated);
}

}  // namespace turbomill::cuda
