// Launching Hopper's attention of prompts: the tensor maps of its operands, and whether it fits.
#include <algorithm>

#include "kernels/cuda/attention_prompt.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kMostDim = 256, kMostRows = 128, kFewestBoxRows = 8;

// Rows of a box of the cache: it lies in one block, and tiles of keys are made of whole ones.
int box_rows(const CacheView& cache) {
    return std::min(cache.block_len, cache.head_dim <= 128 ? 128 : 64);
}

bool is_power_of_two(int v) {
    return v > 0 && (v & (v - 1)) == 0;
}

}  // namespace

bool attention_prompt_fits(DType type, const CacheView& cache, int num_heads) {
    const bool plain = !cache.quantized();
    if (type == DType::F32 || (plain && cache.dtype != type)) return false;
    if (plain && !(is_power_of_two(cache.block_len) && cache.block_len >= kFewestBoxRows)) return false;
    return cache.head_dim % 8 == 0 && cache.head_dim <= kMostDim && num_heads / cache.heads <= kMostRows &&
           w4_fused_runs();
}

void attention_prompt(DType type, const AttentionArgs& args, const CacheView& cache, bool unpacked,
                      int tokens, int multiprocessors, cudaStream_t stream) {
    if (args.tile_count == 0) return;
    const cuuint64_t dim = cache.head_dim, all_heads = args.num_heads + 2 * cache.heads;
    const int group = args.num_heads / cache.heads, box = box_rows(cache);
    PromptJob job{};
    job.out = args.out;
    job.slices = args.slices;
    job.blocks = unpacked ? nullptr : args.blocks;
    job.tiles = args.tiles;
    job.tile_count = args.tile_count;
    job.num_heads = args.num_heads;
    job.heads = cache.heads;
    job.group = group;
    job.head_dim = cache.head_dim;
    job.tile_tokens = prompt_tile_tokens(group);
    job.block_len = cache.block_len;
    job.scores = args.scores;
    while (1 << job.box_shift < box) ++job.box_shift;
    PromptMaps maps;
    maps.queries = make_map<3>(
        map_type(type), args.qkv, {dim, all_heads, cuuint64_t(tokens)}, {dim * 2, all_heads * dim * 2},
        {64, cuuint32_t(group), cuuint32_t(job.tile_tokens)}, CU_TENSOR_MAP_SWIZZLE_128B);
    // Blocks are named by tables: their number bounds nothing.
    constexpr cuuint64_t kAnyBlocks = 1u << 31;
    maps.cache = make_map<4>(
        map_type(type), cache.data,
        {dim, cuuint64_t(cache.block_len), cuuint64_t(2 * cache.heads), kAnyBlocks},
        {cuuint64_t(cache.row_bytes[0]), cuuint64_t(cache.head_bytes[0]), cuuint64_t(cache.block_bytes)},
        {64, cuuint32_t(box), 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
    with_half_type(type, [&]<class T>() { launch_prompt<T>(maps, job, multiprocessors, stream); });
}

}  // namespace turbomill::cuda
