// What a prompt attends to in a quantized cache, as plain 16-bit values in a workspace: once for each step
// and layer, where attention itself would turn the same codes into values for each of its tiles.
#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/kv_codes.cuh"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {
namespace {

constexpr int kThreads = 128, kSpread = 8;  // blocks that share a tile's part of the keys

// Grid: (tiles, 2 * kv heads, kSpread). The tiles of a slice share its keys, in blocks of the workspace.
template <class T, int Policy>
__global__ void __launch_bounds__(kThreads) kv_unpack_kernel(UnpackArgs a, CacheView c) {
    const QueryTile tile = a.tiles[blockIdx.x];
    const SliceInfo slice = a.slices[tile.slice];
    const int* blocks = a.blocks + slice.block_offset;
    const int value = blockIdx.y / c.heads, head = blockIdx.y % c.heads;
    const int parts = tile.parts * kSpread, part = tile.part * kSpread + blockIdx.z;
    // From the beginning of the first tile of keys that a query sees some of.
    const int first = max(0, slice.context + 1 - a.window) / kUnpackedBlock * kUnpackedBlock;
    const int keys = slice.context + slice.length - first;
    const int begin = first + int(int64_t(keys) * part / parts),
              end = first + int(int64_t(keys) * (part + 1) / parts);
    const int chunks = c.head_dim / 8;
    for (int i = begin * chunks + threadIdx.x; i < end * chunks; i += kThreads) {
        const int key = i / chunks, chunk = i % chunks;
        const int block = blocks[key / c.block_len], place = key % c.block_len;
        const uint8_t* row = cache_row(c, block, value, head, place);
        uint8_t* target =
            cache_row(a.workspace, tile.first_slot + key / kUnpackedBlock, value, head, key % kUnpackedBlock);
        const __half2 params = *cache_params(c, block, value, head, place);
        const auto unpack = [&]<KvFormat F>() {
            return dequantize<T, F>(reinterpret_cast<const EightCodes<F>*>(row)[chunk], params);
        };
        reinterpret_cast<uint4*>(target)[chunk] = value ? unpack.template operator()<kValueFormat<Policy>>()
                                                        : unpack.template operator()<kKeyFormat<Policy>>();
    }
}

}  // namespace

void kv_unpack(DType type, const UnpackArgs& args, const CacheView& cache, cudaStream_t stream) {
    if (args.tile_count == 0) return;
    const dim3 grid(args.tile_count, 2 * cache.heads, kSpread);
    with_half_type(type, [&]<class T>() {
        with_policy(cache.policy, [&]<int Policy>() {
            if constexpr (Policy == 0)
                throw std::invalid_argument("kv_unpack is for quantized caches");
            else
                kv_unpack_kernel<T, Policy><<<grid, kThreads, 0, stream>>>(args, cache);
        });
    });
    check_launch("kv_unpack");
}

}  // namespace turbomill::cuda
