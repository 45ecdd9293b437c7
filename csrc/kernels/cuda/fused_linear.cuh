// Packed weights on Hopper, fused: Y^T = W X^T on the tensor cores, whose A operand, rows of N, comes from
// registers, where the store's words of codes become fragments by a few bit operations (fused_codes.cuh);
// activations are the B operand, in shared memory. One thread keeps a ring of K tiles filled by the copy
// engine; each of the other warpgroups dequantizes and multiplies its own 64 rows: fused_linear_products.cuh.
//
// When tiles are too few to fill the GPU, K is split over the blocks of a cluster, which add their results in
// order through each other's shared memory: no workspace, and the same bits every time.
#pragma once

#include <type_traits>

#include "kernels/cuda/fused_linear_products.cuh"
#include "kernels/cuda/fused_linear_work.cuh"
#include "kernels/cuda/gate.cuh"

namespace turbomill::cuda {

// The stages' barriers, before the block's threads part.
template <int Groups, int Stages, class Ring>
__device__ inline void fused_begin(const Ring& ring) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < Stages; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, Groups * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

// One stage's weights, and its activations, by the copying thread.
template <int Groups, bool Whole, class Sizes>
struct FusedCopier {
    const FusedRing<Groups, Sizes>& ring;
    const FusedMaps& maps;
    const PackedView& w;
    unsigned announced;  // bytes of a stage

    __device__ FusedCopier(const FusedRing<Groups, Sizes>& ring, const FusedMaps& maps, const PackedView& w)
        : ring(ring), maps(maps), w(w) {
        const int stage_groups = fused_stage_groups<Whole, Sizes>(w);
        announced =
            Sizes::kTiles * Sizes::kInput + Groups * (Sizes::kCodes + (w.zeros ? 2 : 1) * stage_groups * 128);
        prefetch_map(maps.codes);
        prefetch_map(maps.scales);
        prefetch_map(maps.x);
    }
    // From tile k of K on, whose scales begin with group `group`; n: of 64 rows of N.
    __device__ void weights(int k, int group, int n, int to) const {
        const unsigned full = ring.full + 8 * to;
        barrier_expect(full, announced);
        CodeTile<Sizes::kBits>::copy(ring.codes(to), maps.codes, k, n, full);
        copy_box(ring.params(to), maps.scales, 0, group, n, full);
        if (w.zeros) copy_box(ring.params(to) + Groups * Sizes::kParams, maps.zeros, 0, group, n, full);
    }
    __device__ void input(int k, int row, int to) const {
#pragma unroll
        for (int tile = 0; tile < Sizes::kTiles; ++tile)
            copy_box(ring.input(to) + tile * Sizes::kInput, maps.x, 64 * (k + tile), row, ring.full + 8 * to);
    }
};

// A block's first 64 rows of N. Halved: of two neighbours, the first one's last are the second one's first.
template <int Groups, bool Halved>
__device__ inline int fused_first_rows(int block) {
    return Halved ? block * (2 * Groups - 1) + blockIdx.x % 2 * (Groups - 1) : block * Groups;
}

// The copying thread.
template <int Groups, int Tokens, bool Whole, bool Halved, class Sizes>
__device__ inline void fused_copies(const FusedRing<Groups, Sizes>& ring, const FusedMaps& maps,
                                    const FusedJob& job, const FusedWork& work) {
    const FusedCopier<Groups, Whole, Sizes> copy(ring, maps, job.w);
    FusedStages<Whole, Sizes> at(work, job), input(at);
    int stage = 0;
    const auto copy_weights = [&] {
        copy.weights(at.k, at.group, fused_first_rows<Groups, Halved>(at.place().x), stage);
    };
    // Weights do not depend on the kernels before this one.
    for (; stage < Sizes::kStages && at.more; at.next(), ++stage) copy_weights();
    wait_dependences();
    for (int to = 0; to < stage; input.next(), ++to) copy.input(input.k, input.place().y * Tokens, to);
    stage = 0;
    for (unsigned parity = 0; at.more; at.next()) {
        barrier_wait(ring.empty + 8 * stage, parity);
        copy_weights();
        copy.input(at.k, at.place().y * Tokens, stage);
        if (++stage == Sizes::kStages) stage = 0, parity ^= 1;
    }
}

// Eight results of a token, at columns n..n+7 of y, which has `columns`.
template <class T>
__device__ inline void store_eight(const FusedJob& job, int columns, int token, int n, const uint4& values) {
    if (token >= job.rows) return;
    T* target = static_cast<T*>(job.y) + int64_t(token) * columns + n;
    if (columns % 8 == 0) {
        if (n < columns) *reinterpret_cast<uint4*>(target) = values;
        return;
    }
    const T* source = reinterpret_cast<const T*>(&values);
    for (int i = 0; i < 8; ++i)
        if (n + i < columns) target[i] = source[i];
}

// Eight gates and the eight values that they pass, as the kernel of the gate alone sees them: rounded to T.
template <class T>
__device__ inline uint4 gated_eight(const T* pair) {
    float gate[8], up[8];
    uint4 result;
    load8(pair, gate);
    load8(pair + 8, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) up[i] = silu_gated<T>(gate[i], up[i]);
    store8(reinterpret_cast<T*>(&result), up);
    return result;
}

// A warpgroup's results of `Tokens` tokens to y in T, by way of shared memory, where they are turned from
// columns to rows. From row n0 and token m0 on.
template <class T, int Tokens, class Sizes>
__device__ inline void fused_store(uint8_t* staging, const FusedJob& job, int n0, int m0,
                                   const float (&acc)[Tokens / 2]) {
    constexpr int kPiece = Tokens < Sizes::kPiece ? Tokens : Sizes::kPiece;
    const int group = threadIdx.x / 128, sub = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    T* piece = reinterpret_cast<T*>(staging) + group * Sizes::kPiece * Sizes::kPieceStride;
    float bias[2] = {};
    if (job.bias) {
        const int n = n0 + 16 * sub + lane / 4;
        if (n < job.w.n) bias[0] = job.bias[n];
        if (n + 8 < job.w.n) bias[1] = job.bias[n + 8];
    }
#pragma unroll
    for (int first = 0; first < Tokens; first += kPiece) {
        meet(1 + group, 128);  // the piece before is out
#pragma unroll
        for (int m = 0; m < kPiece; m += 8) {
            const float* d = acc + (first + m) / 2;
            // Lanes 0-7 name the tokens of the upper eight rows' matrix, 8-15 those of the lower one.
            const T* at = piece + (m + lane % 8) * Sizes::kPieceStride + 16 * sub + lane / 8 % 2 * 8;
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(at)),
                "r"(pack_pair<T>(d[0] + bias[0], d[1] + bias[0])),
                "r"(pack_pair<T>(d[2] + bias[1], d[3] + bias[1]))
                : "memory");
        }
        meet(1 + group, 128);
        if (job.gated) {
            for (int i = threadIdx.x % 128; i < kPiece * 4; i += 128) {
                const int m = i / 4, n = i % 4 * 8;
                store_eight<T>(job, job.w.n / 2, m0 + first + m, n0 / 2 + n,
                               gated_eight(piece + m * Sizes::kPieceStride + 2 * n));
            }
            continue;
        }
        for (int i = threadIdx.x % 128; i < kPiece * 8; i += 128) {
            const int m = i / 8, n = i % 8 * 8;
            store_eight<T>(job, job.w.n, m0 + first + m, n0 + n,
                           *reinterpret_cast<const uint4*>(piece + m * Sizes::kPieceStride + n));
        }
    }
}

// Every warp but the copying one leaves its sums where the ring was.
template <int Tokens, class Sizes>
__device__ inline void fused_leave_sums(float* sums, const float (&acc)[Tokens / 2]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i)
        sums[(i / 4 * 8 + 2 * t + i % 2) * Sizes::kSumStride + row + i / 2 % 2 * 8] = acc[i];
}

// Where a thread finds sums of the cluster to add up: from `at`, one part every `stride` floats, or at the
// same place in each block (0).
struct FusedSums {
    const float* at;
    int stride;
};

// The sums of columns n..n+3, added in the order of the cluster's blocks, and the bias.
__device__ inline float4 fused_sum(const FusedSums& sums, const FusedJob& job, int n) {
    float4 v{};
    for (int r = 0; r < job.splits; ++r) {
        const float4 part = sums.stride ? *reinterpret_cast<const float4*>(sums.at + r * sums.stride)
                                        : load_remote(sums.at, r);
        v.x += part.x, v.y += part.y, v.z += part.z, v.w += part.w;
    }
    if (job.bias) {
        if (n < job.w.n) v.x += job.bias[n];
        if (n + 1 < job.w.n) v.y += job.bias[n + 1];
        if (n + 2 < job.w.n) v.z += job.bias[n + 2];
        if (n + 3 < job.w.n) v.w += job.bias[n + 3];
    }
    return v;
}

// Results of token m at columns n..n+3 to y.
template <class T>
__device__ inline void fused_write(const FusedJob& job, const FusedSums& sums, int m, int n) {
    if (job.gated) {  // n names the gates; the values that they pass are eight columns on
        if (n >= job.w.n) return;
        const float4 gate = fused_sum(sums, job, n), up = fused_sum({sums.at + 8, sums.stride}, job, n + 8);
        const auto pass = [](float g, float u) {  // rounded as where the gate has a kernel of its own
            return silu_gated<T>(to_float(from_float<T>(g)), to_float(from_float<T>(u)));
        };
        *reinterpret_cast<uint2*>(static_cast<T*>(job.y) + int64_t(m) * (job.w.n / 2) + (n - n % 16) / 2 +
                                  n % 16) = make_uint2(pack_pair<T>(pass(gate.x, up.x), pass(gate.y, up.y)),
                                                       pack_pair<T>(pass(gate.z, up.z), pass(gate.w, up.w)));
        return;
    }
    const float4 sum = fused_sum(sums, job, n);
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (n + j >= job.w.n) continue;
        const int64_t target = int64_t(m) * job.w.n + n + j;
        if (job.out_fp32) {
            static_cast<float*>(job.y)[target] = v[j];
        } else {
            static_cast<T*>(job.y)[target] = from_float<T>(v[j]);
        }
    }
}

// use(m, n) for this thread's of `items`: fours of columns n of the block's rows, the gates only where there
// are any, token m by token.
template <class Sizes, class Use>
__device__ inline void fused_each_four(const FusedJob& job, int first, int step, int tokens, Use&& use) {
    const int fours = Sizes::kRows / (job.gated ? 8 : 4);
    for (int i = first; i < tokens * fours; i += step) {
        const int four = i % fours;
        use(i / fours, job.gated ? four / 2 * 16 + four % 2 * 4 : four * 4);
    }
}

// The cluster's sums, each block a share of them, to y.
template <class T, int Tokens, class Sizes>
__device__ inline void fused_add_up(const float* sums, const FusedJob& job, int2 place) {
    const int n0 = place.x * Sizes::kRows, m0 = place.y * Tokens, threads = 2 * Sizes::kRows;
    const int rank = blockIdx.x % job.splits;
    fused_each_four<Sizes>(
        job, rank * threads + threadIdx.x, job.splits * threads, min(Tokens, job.rows - m0),
        [&](int m, int n) { fused_write<T>(job, {sums + m * Sizes::kSumStride + n, 0}, m0 + m, n0 + n); });
}

// Every warp but the copying one sends its sums of token m to block m % splits of the cluster.
template <int Tokens, class Sizes>
__device__ inline void fused_push_sums(const float* pushed, const FusedJob& job, int tokens,
                                       const float (&acc)[Tokens / 2]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int slots = (Tokens + job.splits - 1) / job.splits, first = blockIdx.x % job.splits * slots;
#pragma unroll
    for (int i = 0; i < Tokens / 4; ++i) {
        const int m = i / 2 * 8 + 2 * t + i % 2;
        if (m >= tokens) continue;
        const unsigned at =
            remote_address(pushed + (first + m / job.splits) * Sizes::kSumStride + row, m % job.splits);
        store_remote(at, acc[i / 2 * 4 + i % 2]);
        store_remote(at + 8 * 4, acc[i / 2 * 4 + i % 2 + 2]);
    }
}

// What was sent to this block, to y.
template <class T, int Tokens, class Sizes>
__device__ inline void fused_add_pushed(const float* pushed, const FusedJob& job, int2 place) {
    const int n0 = place.x * Sizes::kRows, m0 = place.y * Tokens, rank = blockIdx.x % job.splits;
    const int slots = (Tokens + job.splits - 1) / job.splits;
    const int own = (min(Tokens, job.rows - m0) - rank + job.splits - 1) / job.splits;
    fused_each_four<Sizes>(job, threadIdx.x, 2 * Sizes::kRows, own, [&](int slot, int n) {
        fused_write<T>(job, {pushed + slot * Sizes::kSumStride + n, slots * Sizes::kSumStride},
                       m0 + slot * job.splits + rank, n0 + n);
    });
}

// A thread block's sums to its cluster, and its share of the cluster's results to y: by every warp but the
// copying ones, which only attend.
template <class T, int Groups, int Tokens, class Sizes>
__device__ inline void fused_exchange(uint8_t* base, const FusedJob& job, int2 place,
                                      const float (&acc)[Tokens / 2]) {
    if constexpr (Sizes::kPushes) {
        const float* pushed = reinterpret_cast<const float*>(base + Sizes::kRing);
        cluster_wait();
        fused_push_sums<Tokens, Sizes>(pushed, job, min(Tokens, job.rows - place.y * Tokens), acc);
        cluster_meet();
        fused_add_pushed<T, Tokens, Sizes>(pushed, job, place);
    } else {
        float* sums = reinterpret_cast<float*>(base);
        meet(1, 128 * Groups);  // nobody reads the ring any more
        fused_leave_sums<Tokens, Sizes>(sums, acc);
        cluster_meet();
        fused_add_up<T, Tokens, Sizes>(sums, job, place);
        cluster_meet();  // nobody leaves while others read its sums
    }
}
template <class Sizes>
__device__ inline void fused_attend_exchange() {
    if constexpr (Sizes::kPushes) {
        cluster_wait();
    } else {
        cluster_meet();
    }
    cluster_meet();
}

// Halved: two thread blocks have 2 Groups - 1 times 64 rows of N; those in the middle both, for half of the
// tokens each. For the numbers of rows that would leave many multiprocessors idle.
template <class T, int Bits, int Groups, int Tokens, int Blocks, bool Whole, bool Halved>
__global__ void __launch_bounds__(FusedSizes<Bits, Groups, Tokens, Blocks, Whole>::kThreads, Blocks)
    fused_kernel(const __grid_constant__ FusedMaps maps, const FusedJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Sizes = FusedSizes<Bits, Groups, Tokens, Blocks, Whole>;
    extern __shared__ uint8_t dynamic[];
    // Static, so that the host can tell this body from the empty one of other architectures.
    __shared__ uint64_t barriers[2 * Sizes::kStages];
    uint8_t* base = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const FusedRing<Groups, Sizes> ring{shared_address(base), shared_address(barriers),
                                        shared_address(barriers + Sizes::kStages)};
    FusedWork work(job, Sizes::kTiles, Halved);
    fused_begin<Groups, Sizes::kStages>(ring);
    launch_dependents();
    if (Sizes::kPushes && !job.direct) cluster_arrive();  // who is running may be sent sums
    if (threadIdx.x >= 128 * Groups) {
        if constexpr (Sizes::kHandsOn) registers_down<Sizes::kCopyRegisters>();
        if (threadIdx.x == 128 * Groups) fused_copies<Groups, Tokens, Whole, Halved>(ring, maps, job, work);
        __syncwarp();
        if (job.direct) return;
        fused_attend_exchange<Sizes>();
    } else {
        if constexpr (Sizes::kHandsOn) registers_up<Sizes::kProductRegisters>();
        using Products = std::conditional_t<Sizes::kByWarps, WarpProducts<T, Groups, Tokens, Whole, Sizes>,
                                            GroupProducts<T, Groups, Tokens, Whole, Sizes>>;
        RingReader<T, Groups, Whole, Sizes> at(ring, job);
        const int group = threadIdx.x / 128;
        const auto first_row = [&] { return 64 * (fused_first_rows<Groups, Halved>(work.place.x) + group); };
        if constexpr (Halved) {
            const int half = blockIdx.x % 2;
            if (group == (half ? 0 : Groups - 1)) {
                const GroupProducts<T, Groups, Tokens / 2, Whole, Sizes> products(ring, half * Tokens / 2);
                while (work.next(job)) {
                    float acc[Tokens / 4];
                    products.run(at, work.begin, work.end, acc);
                    fused_store<T, Tokens / 2, Sizes>(base + Sizes::kRing, job, first_row(),
                                                      work.place.y * Tokens + half * Tokens / 2, acc);
                }
                return;
            }
        }
        const Products products(ring);
        while (work.next(job)) {
            float acc[Tokens / 2];
            products.run(at, work.begin, work.end, acc);
            if (Halved || job.direct) {
                fused_store<T, Tokens, Sizes>(base + Sizes::kRing, job, first_row(), work.place.y * Tokens,
                                              acc);
                continue;
            }
            fused_exchange<T, Groups, Tokens, Sizes>(base, job, work.place, acc);
            return;
        }
    }
#endif
}

}  // namespace turbomill::cuda
