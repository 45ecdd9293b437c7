// Causal attention of prompts over the paged cache on Hopper: FlashAttention-3's shape. One warp has the copy
// engine bring tiles of queries, keys and values; two warpgroups multiply, each for its own 64 query rows,
// with wgmma. A warpgroup's scores of the next keys are computed while the softmax of the last ones runs, and
// the warpgroups take turns at the tensor cores.
//
// A tile's rows are tokens by the query heads of one KV head, so that these share keys and values. Thread
// blocks stay and take tiles in turn, longest first: the next tile's queries arrive while this one ends.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_prompt.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/scores.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace turbomill::cuda {
namespace {

// Sizes for heads of up to D dimensions, a multiple of 64.
template <int D>
struct PromptSizes {
    static constexpr int kRows = 128, kKeys = D <= 128 ? 128 : 64, kPanels = D / 64, kStages = 2;
    static constexpr int kQueryPanel = kRows * 128, kPanel = kKeys * 128;  // bytes of 64 dimensions
    static constexpr int kQueries = kPanels * kQueryPanel, kTile = kPanels * kPanel;
    static constexpr int kShared = kQueries + 2 * kStages * kTile + 1024;
    // A whole warpgroup copies, to hand most of its registers on.
    static constexpr int kThreads = 3 * 128, kCopyRegisters = 40, kProductRegisters = 232;
};

// Addresses in shared memory; barriers of 8 bytes.
template <class Sizes>
struct PromptPlaces {
    unsigned queries, keys, values;
    unsigned queries_full, queries_empty, keys_full, keys_empty, values_full, values_empty;
};

// The tiles of a thread block, there and back again, so that none gets only the longest of each round.
struct PromptWork {
    int index = 0, count;

    __device__ explicit PromptWork(int tiles) : count(tiles) {}
    __device__ bool next(int& item) {
        const int blocks = gridDim.x, round = index++;
        item = round * blocks + (round % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
        return round * blocks < count;  // an item past the last may precede none
    }
};

// The copying warp.
template <int D, bool Plain, class Sizes>
__device__ inline void prompt_copies(const PromptPlaces<Sizes>& at, const PromptMaps& maps,
                                     const PromptJob& job) {
    const int lane = threadIdx.x % 32;
    const int box = 1 << job.box_shift, pieces = Sizes::kKeys >> job.box_shift;
    PromptWork work(job.tile_count * job.heads);
    int stage = 0;
    unsigned parity = 1, query_parity = 1;
    for (int item; work.next(item);) {
        if (item >= work.count) continue;
        const int head = item % job.heads;
        const QueryTile tile = job.tiles[item / job.heads];
        const SliceInfo slice = job.slices[tile.slice];
        const int end = tile.end, last_piece = (end - 1) >> job.box_shift;
        if (lane == 0) {
            barrier_wait(at.queries_empty, query_parity);
            barrier_expect(at.queries_full, Sizes::kPanels * job.tile_tokens * job.group * 128);
            for (int panel = 0; panel < Sizes::kPanels; ++panel)
                copy_box(at.queries + panel * Sizes::kQueryPanel, maps.queries, 64 * panel, head * job.group,
                         slice.first_row + tile.first / job.group, at.queries_full);
        }
        query_parity ^= 1;
        const int start = Plain ? 0 : job.first_key(slice, tile) / Sizes::kKeys * Sizes::kKeys;
        int block = 0;  // of piece (first + lane), first a multiple of 32
        for (int key = start; key < end; key += Sizes::kKeys) {
            const int first = key >> job.box_shift;
            if (first % 32 == 0 || (!Plain && key == start)) {
                const int piece = min(first / 32 * 32 + lane, last_piece),
                          number = (piece << job.box_shift) / job.block_len;
                block = job.blocks ? job.blocks[slice.block_offset + number] : tile.first_slot + number;
            }
            for (int value = 0; value < 2; ++value) {
                const unsigned full = (value ? at.values_full : at.keys_full) + 8 * stage;
                const unsigned to = (value ? at.values : at.keys) + stage * Sizes::kTile;
                if (lane == 0) {
                    barrier_wait((value ? at.values_empty : at.keys_empty) + 8 * stage, parity);
                    barrier_expect(full, Sizes::kTile);
                }
                for (int i = 0; i < pieces; ++i) {
                    const int piece = min(first + i, last_piece);
                    const int from = __shfl_sync(kFullWarp, block, piece % 32);
                    const int place = (piece << job.box_shift) % job.block_len;
                    if (lane != 0) continue;
                    for (int panel = 0; panel < Sizes::kPanels; ++panel)
                        copy_box(to + panel * Sizes::kPanel + i * box * 128, maps.cache, 64 * panel, place,
                                 value * job.heads + head, from, full);
                }
            }
            if (++stage == Sizes::kStages) stage = 0, parity ^= 1;
        }
    }
}

// The running softmax of a thread's rows g (0) and g + 8 (1), in units of scores; sums are of its own
// columns.
struct PromptSoftmax {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, shrink[2];

    // Scores become weights. `scale` turns a score into a power of two. Plain: every row has seen a key.
    template <bool Plain, int N>
    __device__ void weigh(float (&s)[N], float scale) {
        float most[2] = {top[0], top[1]};
#pragma unroll
        for (int i = 0; i < N; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(kFullWarp, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(kFullWarp, most[r], 2));
            const float from = !Plain && most[r] == -INFINITY ? 0.f : most[r];
            shrink[r] = power_of_two((top[r] - from) * scale);
            top[r] = most[r];
            base[r] = from * scale;
            sum[r] *= shrink[r];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = power_of_two(s[i] * scale - base[i / 2 % 2]);
            sum[i / 2 % 2] += s[i];
        }
    }
};

// A multiplying warpgroup. Plain: without window and cap.
template <class T, int D, bool Plain, class Sizes>
class PromptProducts {
  public:
    __device__ PromptProducts(const PromptPlaces<Sizes>& at, const PromptJob& job, uint8_t* values)
        : at_(at), job_(job), values_(values) {}

    __device__ void run(int group) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int g = lane / 4, t = lane % 4;
        const float scale = kLog2E * job_.scores.scale;
        const SoftCap cap(job_.scores.scale, job_.scores.softcap);  // of no use when Plain
        if (group == 1) pass(kTurn, 256);                           // the first turn is warpgroup 0's
        PromptWork work(job_.tile_count * job_.heads);
        for (int item; work.next(item);) {
            if (item >= work.count) continue;
            const QueryTile tile = job_.tiles[item / job_.heads];
            const SliceInfo slice = job_.slices[tile.slice];
            const int end = tile.end;
            const int row = 64 * group + 16 * warp + g, all = slice.length * job_.group;
            // Keys that rows see, and that the first row of the warpgroup sees.
            const auto limit_of = [&](int r) {
                return slice.context + min(tile.first + r, all - 1) / job_.group + 1;
            };
            const int limit[2] = {limit_of(row), limit_of(row + 8)}, fewest = limit_of(64 * group);
            const int start = Plain ? 0 : job_.first_key(slice, tile) / Sizes::kKeys * Sizes::kKeys;
            const int unseen = limit_of(64 * group + 63) - job_.scores.window;  // by the last row
            float out[D / 2] = {}, score[Sizes::kKeys / 2];
            unsigned weight[Sizes::kKeys / 4];
            PromptSoftmax softmax;
            const auto weigh = [&](int key) {
                if constexpr (!Plain) {
                    if (job_.scores.softcap > 0.f) {
#pragma unroll
                        for (float& s : score) s = cap(s);
                    }
                    if (key < unseen) {
#pragma unroll
                        for (int i = 0; i < Sizes::kKeys / 2; ++i)
                            if (key + i / 4 * 8 + 2 * t + i % 2 < limit[i / 2 % 2] - job_.scores.window)
                                score[i] = -INFINITY;
                    }
                }
                if (key + Sizes::kKeys > fewest) {
#pragma unroll
                    for (int i = 0; i < Sizes::kKeys / 2; ++i)
                        if (key + i / 4 * 8 + 2 * t + i % 2 >= limit[i / 2 % 2]) score[i] = -INFINITY;
                }
                softmax.template weigh<Plain>(score, scale);
            };
            const auto round = [&] {
#pragma unroll
                for (int i = 0; i < Sizes::kKeys / 4; ++i)
                    weight[i] = pack_pair<T>(score[2 * i], score[2 * i + 1]);
            };

            barrier_wait(at_.queries_full, query_parity_);
            query_parity_ ^= 1;
            const unsigned queries = swizzled_rows(at_.queries + group * 64 * 128);
            barrier_wait(at_.keys_full + 8 * stage_, parity_);
            meet(kTurn + group, 256);
            products_begin();
            multiply_keys(queries, stage_, score);
            products_commit();
            pass(kTurn + 1 - group, 256);
            products_wait<0>();
            products_land(score);
            release(at_.keys_empty, stage_);
            weigh(start);
            round();
            for (int key = start + Sizes::kKeys; key < end; key += Sizes::kKeys) {
                const int last = stage_;
                const unsigned last_parity = parity_;
                advance();
                barrier_wait(at_.keys_full + 8 * stage_, parity_);
                meet(kTurn + group, 256);
                products_begin();
                multiply_keys(queries, stage_, score);
                products_commit();
                barrier_wait(at_.values_full + 8 * last, last_parity);
                products_begin();
                multiply_values(weight, last, out);
                products_commit();
                pass(kTurn + 1 - group, 256);
                products_wait<1>();
                products_land(score);
                release(at_.keys_empty, stage_);
                weigh(key);
                products_wait<0>();
                products_land(out);
                release(at_.values_empty, last);
#pragma unroll
                for (int i = 0; i < D / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
                round();
            }
            release(at_.queries_empty, 0);
            barrier_wait(at_.values_full + 8 * stage_, parity_);
            clear_values(stage_, end % Sizes::kKeys, group);
            products_begin();
            multiply_values(weight, stage_, out);
            products_commit();
            products_wait<0>();
            products_land(out);
            release(at_.values_empty, stage_);
            advance();
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                softmax.sum[r] += __shfl_xor_sync(kFullWarp, softmax.sum[r], 1);
                softmax.sum[r] += __shfl_xor_sync(kFullWarp, softmax.sum[r], 2);
                const int at = tile.first + row + 8 * r;
                if (row + 8 * r >= job_.tile_tokens * job_.group || at >= all) continue;
                const int head = item % job_.heads;
                T* target =
                    static_cast<T*>(job_.out) + (int64_t(slice.first_row + at / job_.group) * job_.num_heads +
                                                 head * job_.group + at % job_.group) *
                                                    job_.head_dim;
                const float inverse = 1.f / softmax.sum[r];
#pragma unroll
                for (int j = 0; j < D / 8; ++j)
                    if (8 * j < job_.head_dim)
                        *reinterpret_cast<unsigned*>(target + 8 * j + 2 * t) =
                            pack_pair<T>(out[4 * j + 2 * r] * inverse, out[4 * j + 2 * r + 1] * inverse);
            }
        }
        if (group == 0) meet(kTurn, 256);  // the turn that nobody takes
    }

  private:
    static constexpr int kTurn = 1, kClear = 3;  // named barriers, one for each warpgroup

    __device__ void advance() {
        if (++stage_ == Sizes::kStages) stage_ = 0, parity_ ^= 1;
    }
    __device__ void release(unsigned barriers, int stage) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers + 8 * stage);
    }
    // score [64, keys] = queries keys^T
    __device__ void multiply_keys(unsigned queries, int stage, float (&score)[Sizes::kKeys / 2]) const {
        const unsigned keys = swizzled_rows(at_.keys + stage * Sizes::kTile);
#pragma unroll
        for (int i = 0; i < D / 16; ++i)
            queue_shared_product<T, Sizes::kKeys>(
                score, describe(queries + i / 4 * (Sizes::kQueryPanel / 16) + i % 4 * 2),
                describe(keys + i / 4 * (Sizes::kPanel / 16) + i % 4 * 2), i > 0);
    }
    // out [64, D] += weights values
    __device__ void multiply_values(const unsigned (&weight)[Sizes::kKeys / 4], int stage,
                                    float (&out)[D / 2]) const {
        const unsigned values = swizzled_rows(at_.values + stage * Sizes::kTile);
#pragma unroll
        for (int i = 0; i < Sizes::kKeys / 16; ++i)
            queue_product<T, D, true>(out, weight + 4 * i, describe_turned<Sizes::kPanel>(values + i * 128),
                                      1);
    }
    // Values from row `valid` on become zeros: what was never written may be NaN, whose product with a weight
    // of zero is not zero. Both warpgroups do the same.
    __device__ void clear_values(int stage, int valid, int group) const {
        if (valid == 0) return;
        uint8_t* tile = values_ + stage * Sizes::kTile;
        const int count = (Sizes::kKeys - valid) * 8;
        for (int panel = 0; panel < Sizes::kPanels; ++panel)
            for (int i = threadIdx.x % 128; i < count; i += 128)
                reinterpret_cast<uint4*>(tile + panel * Sizes::kPanel + valid * 128)[i] = uint4{};
        fence_for_products();
        meet(kClear + group, 128);
    }

    const PromptPlaces<Sizes>& at_;
    const PromptJob& job_;
    uint8_t* values_;
    int stage_ = 0;
    unsigned parity_ = 0, query_parity_ = 0;
};

template <class T, int D, bool Plain>
__global__ void __launch_bounds__(PromptSizes<D>::kThreads, 1)
    prompt_kernel(const __grid_constant__ PromptMaps maps, const PromptJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Sizes = PromptSizes<D>;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[2 + 4 * Sizes::kStages];
    uint8_t* base = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const unsigned data = shared_address(base), first = shared_address(barriers);
    uint8_t* values = base + Sizes::kQueries + Sizes::kStages * Sizes::kTile;
    const PromptPlaces<Sizes> at{data,
                                 data + Sizes::kQueries,
                                 shared_address(values),
                                 first,
                                 first + 8,
                                 first + 16,
                                 first + 16 + 8 * Sizes::kStages,
                                 first + 16 + 16 * Sizes::kStages,
                                 first + 16 + 24 * Sizes::kStages};
    if (threadIdx.x == 0) {
        barrier_init(at.queries_full, 1);
        barrier_init(at.queries_empty, 8);
        for (int i = 0; i < 8 * Sizes::kStages; i += 8) {
            barrier_init(at.keys_full + i, 1);
            barrier_init(at.keys_empty + i, 8);
            barrier_init(at.values_full + i, 1);
            barrier_init(at.values_empty + i, 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);  // the compiler knows it uniform
    if (group == 2) {
        registers_down<Sizes::kCopyRegisters>();
        if (__shfl_sync(kFullWarp, threadIdx.x / 32, 0) == 8) prompt_copies<D, Plain, Sizes>(at, maps, job);
    } else {
        registers_up<Sizes::kProductRegisters>();
        PromptProducts<T, D, Plain, Sizes>(at, job, values).run(group);
    }
#endif
}

template <class T, int D>
void launch_prompt_for(const PromptMaps& maps, const PromptJob& job, int multiprocessors,
                       cudaStream_t stream) {
    using Sizes = PromptSizes<D>;
    const bool plain = job.scores.window == kNoWindow && job.scores.softcap == 0.f;
    const auto kernel = plain ? prompt_kernel<T, D, true> : prompt_kernel<T, D, false>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sizes::kShared),
          "attention_prompt's shared memory");
    const int blocks = std::min(multiprocessors, job.tile_count * job.heads);
    kernel<<<blocks, Sizes::kThreads, Sizes::kShared, stream>>>(maps, job);
    check_launch("attention_prompt");
}

}  // namespace

template <class T>
void launch_prompt(const PromptMaps& maps, const PromptJob& job, int multiprocessors, cudaStream_t stream) {
    if (job.head_dim <= 64) return launch_prompt_for<T, 64>(maps, job, multiprocessors, stream);
    if (job.head_dim <= 128) return launch_prompt_for<T, 128>(maps, job, multiprocessors, stream);
    if (job.head_dim <= 192) return launch_prompt_for<T, 192>(maps, job, multiprocessors, stream);
    return launch_prompt_for<T, 256>(maps, job, multiprocessors, stream);
}

}  // namespace turbomill::cuda
