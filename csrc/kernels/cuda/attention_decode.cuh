// Attention of slices of few query rows (decodes) over the paged cache, bound by the bytes of the cache.
//
// The keys of all slices and KV heads, in units of 64, form one line. The host cuts it into ranges, one for
// each block of a grid that fills the GPU once and does not depend on the batch (tiles.cc): uneven sequences
// share it evenly, and a block knows where to begin after one load. A range covers parts of one or several
// (head, slice) pairs. The blocks of a pair that was cut leave partial results in the workspace; the last to
// arrive merges them, in order.
//
// Within a block each warp streams keys and values of its own through a ring in shared memory, several tiles
// ahead, with no barrier between warps. Scores are computed transposed, S^T = K Q^T, and outputs too,
// O^T = V^T P^T: cached rows fill the 16 rows of the tensor cores' tile, a KV head's query rows its 8
// columns. With codes c, scales s and zeros z, q (s c + z) = s (q c) + z sum(q) and p (s c + z) = (p s) c + p
// z: nothing is done to single elements of the cache (decode_tile.cuh).
//
// With Rope, each slice is one new token whose query and key are not rotated and whose rows are not cached
// yet: the kernel does that on its way (decode_fresh.cuh).
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/decode_merge.cuh"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {
namespace {

template <int Policy, int D, int Columns, int Keys, int Stages>
constexpr int kDecodeShared = std::max({kDecodeWarps * Stages * kStageBytes<Policy, D, Keys>,  // the rings,
                                        WarpResults<D, 8 * Columns>::kBytes,  // warps that merge,
                                        (kMostDecodeParts + 2) * 32 * 4});    // parts that merge

template <class T, int Policy, int D, int Columns, bool Rope, bool Plain, int Keys, int Stages, int Blocks>
__global__ void __launch_bounds__(kDecodeWarps * 32, Blocks)
    decode_kernel(DecodeArgs a, AttentionParts workspace, CacheView c) {
    constexpr int kRows = 8 * Columns;
    extern __shared__ uint4 shared[];
    __shared__ float tops[kDecodeWarps][16], sums[kDecodeWarps][16];
    __shared__ bool last;
    __shared__ std::conditional_t<Rope, FreshRows<Policy, D>, char> fresh;
    // With Rope: of a position, D / 2 cosines, then as many sines.
    __shared__ alignas(16) float angles[kDecodeWarps][Rope ? D : 1];
    allow_next();
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    uint8_t* ring = reinterpret_cast<uint8_t*>(shared) + warp * Stages * kStageBytes<Policy, D, Keys>;
    const int group = a.num_heads / c.heads;
    const int64_t width = int64_t(a.num_heads + 2 * c.heads) * D;

    const DecodeRange range = a.ranges[blockIdx.x];
    if (range.begin >= range.end) {
        // Leaving at once would be as safe, for other blocks wait; but the next linear would then start while
        // the last one runs, which was measured to be slower.
        wait_for_previous();
        return;
    }
    DecodeEntry e = range.first;
    int head = range.head, entry = range.entry, pair_begin = range.pair_begin, pair_end = range.pair_end;
    bool waited = false;
    for (int at = range.begin; at < range.end;) {
        const int until = min(range.end, pair_end);
        const int all = e.context + e.length, rows = e.length * group;
        KeyStream<Policy, D, Keys, Stages> stream(
            c, head, a.blocks + e.block_offset, e.first_key + (at - pair_begin) * kDecodeUnit,
            min(all, e.first_key + (until - pair_begin) * kDecodeUnit), all, ring);
#pragma unroll
        for (int i = 0; i < Stages - 1; ++i) {
            // What earlier steps cached may be read before the kernels ahead of this one are done.
            if (!Rope && !waited && stream.wants() && stream.wanted_end() > e.context) {
                wait_for_previous();
                waited = true;
            }
            stream.request_first(i);
        }
        float *cos = angles[warp], *sin = cos + D / 2;
        if constexpr (Rope) {
            const int64_t position = int64_t(e.context) * (D / 2);
            for (int i = threadIdx.x % 32; i < D / 2; i += 32)
                cos[i] = a.cos[position + i], sin[i] = a.sin[position + i];
            __syncwarp();
        }
        if (!waited) wait_for_previous();
        waited = true;
        Queries<T, Policy, D, Columns, Rope> queries;
        queries.request(static_cast<const T*>(a.qkv), width, e.first_row, head, group, rows);
        if constexpr (Rope) {
            if (stream.owns(e.context))
                stream.template store_fresh<T>(
                    static_cast<const T*>(a.qkv) + e.first_row * width + (a.num_heads + head) * D, e.context,
                    cos, sin, fresh);
        }
        queries.finish(a.scores.scale, cos, sin, c.rotated);
        int limit[Columns][2];
#pragma unroll
        for (int n = 0; n < Columns; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                limit[n][i] = e.context + min(8 * n + 2 * t + i, rows - 1) / group + 1;
        Running<D, Columns> r;
        for (int key; stream.next_tile(key);) {
            uint8_t* stage = stream.take();
            stream.request_next();
            if constexpr (Rope)
                if (e.context < key + Keys) fresh.template patch<Keys>(stage, e.context - key);
            attend<Plain, T, Policy, D, Columns, Rope, Keys>(stage, key, limit, e.context + 1, all, a.scores,
                                                             queries, r);
        }

        wait_copies<0>();
        __syncthreads();  // the rings are free: the warps of the block meet there
        const WarpResults<D, kRows> results{reinterpret_cast<float*>(shared), tops, sums};
        results.template put<Policy>(r, queries);
        __syncthreads();
        const DecodeOutput<T, D> output{static_cast<T*>(a.out),
                                        a.num_heads,
                                        e.first_row,
                                        head,
                                        group,
                                        kRotatesInside<Policy, D> && a.rotate_outputs};
        const bool whole = at == pair_begin && until == pair_end;
        const int first_block = range.share ? pair_begin / range.share : range.first_block;
        const int parts = range.share ? (pair_end - 1) / range.share - first_block + 1 : range.parts;
        const int slot = 2 * blockIdx.x + (at == pair_begin ? 1 : 0);
        results.merge(rows, whole ? nullptr : workspace.data + int64_t(slot) * kDecodePart<D>, output);
        if (!whole) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                last = atomicAdd(workspace.counters + first_block, 1u) == unsigned(parts - 1);
            __syncthreads();
            if (last) {
                __threadfence();
                merge_parts<T, D>(workspace.data, 2 * first_block + 1, 2 * (first_block + 1), parts, rows,
                                  reinterpret_cast<float*>(shared), output);
                if (threadIdx.x == 0) workspace.counters[first_block] = 0;
            }
        }
        __syncthreads();  // the rings are free again
        at = until;
        if (at >= range.end) return;
        pair_begin = at;
        do {  // slices without keys are padding
            if (++entry == a.count) entry = 0, ++head;
            e = a.entries[entry];
            pair_end = pair_begin + a.entries[entry + 1].first_unit - e.first_unit;
        } while (pair_end == pair_begin);
    }
}

template <class T, int Policy, int D, int Columns, bool Rope, bool Plain, int Keys, int Stages>
void launch_decode(const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache,
                   cudaStream_t stream) {
    constexpr int kBlocks = decode_blocks(Policy, 8 * Columns, D);
    constexpr auto kernel = decode_kernel<T, Policy, D, Columns, Rope, Plain, Keys, Stages, kBlocks>;
    constexpr int kShared = kDecodeShared<Policy, D, Columns, Keys, Stages>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "attention_decode's shared memory");
    launch_overlapped(kernel, dim3(args.range_count), kDecodeWarps * 32, kShared, stream, "attention_decode",
                      args, parts, cache);
}

template <class T, int Policy, int D, int Keys, int Stages>
void launch_decode_variant(const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache,
                           cudaStream_t stream) {
    const auto run = [&]<int Columns, bool Rope, bool Plain>() {
        launch_decode<T, Policy, D, Columns, Rope, Plain, Keys, Stages>(args, parts, cache, stream);
    };
    const auto run_for = [&]<int Columns>() {
        const bool plain = args.scores.window == kNoWindow && args.scores.softcap == 0.f;
        if (args.cos && !plain)
            throw std::invalid_argument("attention_decode rotates for plain attention only");
        if (args.cos) return run.template operator()<Columns, true, true>();
        plain ? run.template operator()<Columns, false, true>()
              : run.template operator()<Columns, false, false>();
    };
    args.most_rows <= 8 ? run_for.template operator()<1>() : run_for.template operator()<2>();
}

}  // namespace

// Once in each file that includes this, for the cache format of that file. Keys: of a tile; Stages: tiles of
// a warp's ring.
template <int Policy, int Keys, int Stages>
void attention_decode_for(DType type, const DecodeArgs& args, const AttentionParts& parts,
                          const CacheView& cache, cudaStream_t stream) {
    with_half_type(type, [&]<class T>() {
        if (cache.head_dim == 64)
            launch_decode_variant<T, Policy, 64, Keys, Stages>(args, parts, cache, stream);
        else if (cache.head_dim == 128)
            launch_decode_variant<T, Policy, 128, Keys, Stages>(args, parts, cache, stream);
        else
            launch_decode_variant<T, Policy, 256, 16, 2>(args, parts, cache, stream);
    });
}

}  // namespace turbomill::cuda
