// W4A16 on Hopper, fused: Y^T = W X^T by wgmma, whose A operand, 64 rows of N, comes from registers, where the
// store's words of codes become fragments by a few bit operations; activations are the B operand, in shared
// memory. One warp keeps a ring of K tiles filled by bulk copies; each of the others' warpgroups
// dequantizes and multiplies its own 64 rows, while the tensor cores work for its neighbours.
//
// When tiles are too few to fill the GPU, K is split over the blocks of a cluster, which add their results in
// order through each other's shared memory: no workspace, and the same bits every time.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/w4_fragment.cuh"
#include "kernels/cuda/w4_fused.h"
#include "kernels/cuda/wgmma.cuh"

namespace turbomill::cuda {

// Sizes of a kernel for `Groups` warpgroups of 64 rows and `Tokens` tokens, `Blocks` to a multiprocessor.
template <int Groups, int Tokens, int Blocks>
struct FusedSizes {
    static constexpr int kRows = 64 * Groups;
    // Where accumulators fill the registers, a whole warpgroup stands by the copying warp, to hand its own on.
    static constexpr bool kHandsOn = Groups * Tokens >= 512;
    static constexpr int kThreads = 128 * Groups + (kHandsOn ? 128 : 32);
    static constexpr int kCopyRegisters = Groups == 2 ? 40 : 32, kProductRegisters = Groups == 2 ? 232 : 112;

    // A stage of the ring: tiles of 64 of K.
    static constexpr int kTiles = Tokens <= 64 && Groups * Blocks <= 6 ? 2 : 1;
    static constexpr int kInput = Tokens * 128;              // bytes of x, of a tile
    static constexpr int kCodes = kTiles * 2048;             // of codes, of 64 rows of N
    static constexpr int kParams = kTiles * 256;             // of scales, and as many of zeros, likewise
    static constexpr int kStage = kTiles * kInput + Groups * (kCodes + 2 * kParams);
    // Codes become fragments and are multiplied in two steps a stage: while one runs, the next is made.
    static constexpr int kStepWords = 2 * kTiles;

    // Results on their way out: a warpgroup's, kPiece tokens at a time.
    static constexpr int kPiece = Tokens < 64 ? Tokens : 64, kPieceStride = 72;
    static constexpr int kOut = Groups * kPiece * kPieceStride * 2;
    static constexpr int kSumStride = kRows + 4;           // of a token's fp32 sums: no two lanes meet in a bank
    static constexpr int kSums = Tokens * kSumStride * 4;  // in the ring's place

    static constexpr int kBudget = (Blocks == 1 ? 227 : 113) * 1024 - 1024 - 512;
    static constexpr int kFit = (kBudget - kOut) / kStage;
    static constexpr int kStages = kFit > 12 ? 12 : kFit;
    static constexpr int kRing = kStages * kStage > kSums ? kStages * kStage : kSums;
    static constexpr int kShared = kRing + kOut + 1024;  // the ring begins at a multiple of 1024
    static_assert(kStages >= 3 && kRing + kOut <= kBudget);
};

// A thread block's tiles, and its part of K.
struct FusedWork {
    int first, step, count;  // tiles first, first + step, ...
    int begin, end;          // K tiles

    __device__ FusedWork(const FusedJob& job, int stage_tiles) {
        const int tiles = job.n_blocks * job.m_tiles, rank = blockIdx.x % job.splits;
        first = blockIdx.x / job.splits, step = gridDim.x / job.splits;
        count = (tiles - first + step - 1) / step;
        const int stages = (job.w.k_tiles + stage_tiles - 1) / stage_tiles;
        begin = stages * rank / job.splits * stage_tiles;
        end = min(stages * (rank + 1) / job.splits * stage_tiles, job.w.k_tiles);
    }

    // Tiles that run at the same time share activations and weights: a band of token tiles, N by N.
    __device__ static int2 place(const FusedJob& job, int tile) {
        constexpr int kBand = 16;
        const int width = min(job.m_tiles, kBand), band = tile / (width * job.n_blocks);
        const int here = min(width, job.m_tiles - band * width), rest = tile - band * width * job.n_blocks;
        return {rest / here, band * width + rest % here};  // block of N, tile of tokens
    }
};

// Addresses in shared memory.
template <int Groups, class Sizes>
struct FusedRing {
    unsigned base, full, empty;  // of the data, and of the stages' barriers, 8 bytes each

    __device__ unsigned input(int stage) const { return base + stage * (Sizes::kTiles * Sizes::kInput); }
    __device__ unsigned codes(int stage) const {
        return input(Sizes::kStages) + stage * (Groups * Sizes::kCodes);
    }
    __device__ unsigned params(int stage) const {
        return codes(Sizes::kStages) + stage * (2 * Groups * Sizes::kParams);
    }
};

// The copying warp. Each lane brings one thing of every stage: codes, scales or zeros of 64 rows; lane 0 also
// x.
template <int Groups, int Tokens, class Sizes>
__device__ inline void fused_copies(const FusedRing<Groups, Sizes>& ring, const CUtensorMap& x_map,
                                    const FusedJob& job, const FusedWork& work) {
    constexpr int kTiles = Sizes::kTiles;
    const W4View& w = job.w;
    const int lane = threadIdx.x % 32, count = work.end - work.begin;
    const int kinds = w.zeros ? 3 : 2, kind = lane / Groups, part = lane % Groups;
    const int tile_params = w.group == 32 ? 256 : 128;  // bytes
    const int stage_params = w.group <= 64 ? kTiles * tile_params : 128;
    // Of this lane, in a whole stage; and stages until its source advances.
    const int bytes = kind == 0 ? Sizes::kCodes : stage_params;
    const int period = kind == 0 ? 1 : w.groups == 1 ? 1 << 30 : max(1, w.group / (64 * kTiles));
    // Of this lane's target from stage to stage.
    const int target_stride = Groups * (kind == 0 ? Sizes::kCodes : 2 * Sizes::kParams);
    const unsigned target =
        kind == 0 ? ring.codes(0) + part * Sizes::kCodes
                  : ring.params(0) + ((kind - 1) * Groups + part) * Sizes::kParams;
    if (lane == 0) prefetch_map(x_map);

    int stage = 0;
    unsigned parity = 1;  // of a stage that nobody has used yet
    for (int i = 0; i < work.count; ++i) {
        const int2 place = FusedWork::place(job, work.first + i * work.step);
        const int bn = place.x * Groups, parts = min(Groups, (w.n + 63) / 64 - bn);
        const bool active = kind < kinds && part < parts;
        const uint8_t* source =
            kind == 0 ? w.codes + (int64_t(bn + part) * w.k_tiles + work.begin) * 2048
                      : static_cast<const uint8_t*>(kind == 1 ? w.scales : w.zeros) +
                            (int64_t(bn + part) * w.groups + 64 * work.begin / w.group) * 128;
        int left = period - work.begin / kTiles % period;

        const auto copy_weights = [&](int k, int to) {
            const unsigned full = ring.full + 8 * to;
            // The last stage may lack its second tile.
            const bool whole = kTiles == 1 || k + 1 < work.end;
            if (lane == 0) {
                const int params = whole || w.group > 64 ? stage_params : tile_params;
                barrier_expect(full, kTiles * Sizes::kInput + parts * ((whole ? Sizes::kCodes : 2048) +
                                                                       (kinds - 1) * params));
            }
            __syncwarp();
            if (active) {
                const bool half = !whole && (kind == 0 || w.group <= 64);
                copy_bulk(target + to * target_stride, source, half ? bytes / 2 : bytes, full);
            }
            if (--left == 0) source += bytes, left = period;
        };
        const auto copy_input = [&](int k, int to) {
            if (lane < kTiles)  // a tile beyond the last arrives as zeros
                copy_box(ring.input(to) + lane * Sizes::kInput, x_map, 64 * (k + lane), place.y * Tokens,
                     ring.full + 8 * to);
        };
        int k = work.begin;
        if (i == 0) {  // weights do not depend on the kernels before this one
            const int lead = min((count + kTiles - 1) / kTiles, Sizes::kStages);
            for (int to = 0; to < lead; ++to) copy_weights(k + to * kTiles, to);
            wait_dependences();
            for (int to = 0; to < lead; ++to) copy_input(k + to * kTiles, to);
            k += lead * kTiles, stage = lead;
            if (stage == Sizes::kStages) stage = 0, parity = 0;
        }
        for (; k < work.end; k += kTiles) {
            barrier_wait(ring.empty + 8 * stage, parity);
            copy_weights(k, stage);
            copy_input(k, stage);
            if (++stage == Sizes::kStages) stage = 0, parity ^= 1;
        }
    }
}

// A multiplying warp's way through the ring.
template <class T, int Groups, int Tokens, class Sizes>
class FusedProducts {
  public:
    __device__ FusedProducts(const FusedRing<Groups, Sizes>& ring, const FusedJob& job) : ring_(ring) {
        const int group = threadIdx.x / 128, sub = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        codes_ = ring.codes(0) + group * Sizes::kCodes + sub * 512 + lane * 16;
        params_ = ring.params(0) + group * Sizes::kParams + sub * 32 + lane / 4 * 4;
        rows_ = swizzled_rows(ring.input(0));
        zeros_ = job.w.zeros;
        group_ = job.w.group;
        releases_ = lane == 0;
    }

    // acc [64, Tokens] of the warpgroup = its rows of W times X, over tiles [begin, end) of K.
    __device__ void run(int begin, int end, float (&acc)[Tokens / 2]) {
        unsigned a[2][Sizes::kStepWords][4];
        unsigned done = 0;  // barrier of the stage whose products are not known to have ended
        for (int k = begin; k < end; k += Sizes::kTiles) {
            barrier_wait(ring_.full + 8 * stage_, parity_);
            const uint4 codes = load_shared_16(codes_ + stage_ * (Groups * Sizes::kCodes));
            const unsigned params = params_ + stage_ * (2 * Groups * Sizes::kParams);
            const uint64_t rows = further(rows_, stage_ * (Sizes::kTiles * Sizes::kInput));
            ScaledCodes<T> scaled = params_at(params);
            const unsigned empty = ring_.empty + 8 * stage_;
            if constexpr (Sizes::kTiles == 1) {
                scaled(codes.x, a[0][0]);
                scaled(codes.y, a[0][1]);
                multiply(a[0], rows, k > begin, acc);
                if (done) release(done);
                if (group_ == 32) scaled = params_at(params + 128);
                scaled(codes.z, a[1][0]);
                scaled(codes.w, a[1][1]);
                multiply(a[1], further(rows, 64), true, acc);
            } else {
                unsigned next = params;  // where the parameters of the tile's second half are, then of the next
                scaled(codes.x, a[0][0]);
                scaled(codes.y, a[0][1]);
                if (group_ == 32) scaled = params_at(next += 128);
                scaled(codes.z, a[0][2]);
                scaled(codes.w, a[0][3]);
                multiply(a[0], rows, k > begin, acc);
                if (done) release(done);
                const uint4 more = load_shared_16(codes_ + stage_ * (Groups * Sizes::kCodes) + 2048);
                if (group_ <= 64) scaled = params_at(next += 128);
                // Beyond the last tile x is 0, and a weight of anything else than a finite number would do harm.
                if (k + 1 == end) scaled = ScaledCodes<T>(0, 0);
                scaled(more.x, a[1][0]);
                scaled(more.y, a[1][1]);
                if (group_ == 32 && k + 1 < end) scaled = params_at(next += 128);
                scaled(more.z, a[1][2]);
                scaled(more.w, a[1][3]);
                multiply(a[1], further(rows, Sizes::kInput), true, acc);
            }
            done = empty;
            if (++stage_ == Sizes::kStages) stage_ = 0, parity_ ^= 1;
        }
        products_wait<0>();
        if (done) release(done);
    }

  private:
    __device__ ScaledCodes<T> params_at(unsigned at) const {
        return {load_shared_4(at), zeros_ ? load_shared_4(at + Groups * Sizes::kParams) : ScaledCodes<T>::kEight};
    }
    // Queues a step's products, and waits for those before.
    __device__ void multiply(const unsigned (&a)[Sizes::kStepWords][4], uint64_t rows, int add,
                             float (&acc)[Tokens / 2]) const {
        products_begin();
#pragma unroll
        for (int j = 0; j < Sizes::kStepWords; ++j)
            queue_product<T, Tokens>(acc, a[j], further(rows, 32 * j), j > 0 ? 1 : add);
        products_commit();
        products_wait<1>();
    }
    __device__ void release(unsigned empty) const {
        if (releases_) barrier_arrive(empty);
    }

    const FusedRing<Groups, Sizes>& ring_;
    unsigned codes_, params_;
    uint64_t rows_;
    int group_, stage_ = 0;
    unsigned parity_ = 0;
    bool zeros_, releases_;
};

// Eight results of a token, at columns n..n+7 of y.
template <class T>
__device__ inline void store_eight(const FusedJob& job, int token, int n, const uint4& values) {
    if (token >= job.rows) return;
    T* target = static_cast<T*>(job.y) + int64_t(token) * job.w.n + n;
    if (job.w.n % 8 == 0) {
        if (n < job.w.n) *reinterpret_cast<uint4*>(target) = values;
        return;
    }
    const T* source = reinterpret_cast<const T*>(&values);
    for (int i = 0; i < 8; ++i)
        if (n + i < job.w.n) target[i] = source[i];
}

// A warpgroup's results to y in T, by way of shared memory, where they are turned from columns to rows.
template <class T, int Tokens, class Sizes>
__device__ inline void fused_store(uint8_t* staging, const FusedJob& job, int2 place, float (&acc)[Tokens / 2]) {
    const int group = threadIdx.x / 128, sub = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    T* piece = reinterpret_cast<T*>(staging) + group * Sizes::kPiece * Sizes::kPieceStride;
    const int n0 = place.x * Sizes::kRows + group * 64, m0 = place.y * Tokens;
    float bias[2] = {};
    if (job.bias) {
        const int n = n0 + 16 * sub + lane / 4;
        if (n < job.w.n) bias[0] = job.bias[n];
        if (n + 8 < job.w.n) bias[1] = job.bias[n + 8];
    }
#pragma unroll
    for (int first = 0; first < Tokens; first += Sizes::kPiece) {
        meet(1 + group, 128);  // the piece before is out
#pragma unroll
        for (int m = 0; m < Sizes::kPiece; m += 8) {
            const float* d = acc + (first + m) / 2;
            // Lanes 0-7 name the tokens of the upper eight rows' matrix, 8-15 those of the lower one.
            const T* at = piece + (m + lane % 8) * Sizes::kPieceStride + 16 * sub + lane / 8 % 2 * 8;
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                             shared_address(at)),
                         "r"(pack_pair<T>(d[0] + bias[0], d[1] + bias[0])),
                         "r"(pack_pair<T>(d[2] + bias[1], d[3] + bias[1]))
                         : "memory");
        }
        meet(1 + group, 128);
        for (int i = threadIdx.x % 128; i < Sizes::kPiece * 8; i += 128) {
            const int m = i / 8, n = i % 8 * 8;
            store_eight<T>(job, m0 + first + m, n0 + n,
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

// The cluster's sums, added in the order of its blocks, each block a share of them, to y.
template <class T, int Tokens, class Sizes>
__device__ inline void fused_add_up(const float* sums, const FusedJob& job, int2 place) {
    const int n0 = place.x * Sizes::kRows, m0 = place.y * Tokens;
    const int count = min(Tokens, job.rows - m0) * (Sizes::kRows / 4), threads = 2 * Sizes::kRows;
    const int rank = blockIdx.x % job.splits;
    for (int i = rank * threads + threadIdx.x; i < count; i += job.splits * threads) {
        const int m = i / (Sizes::kRows / 4), n = i % (Sizes::kRows / 4) * 4;
        const float* at = sums + m * Sizes::kSumStride + n;
        float v[4] = {};
        for (int r = 0; r < job.splits; ++r) {
            const float4 part = load_remote(at, r);
            v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (n0 + n + j >= job.w.n) continue;
            const float value = job.bias ? v[j] + job.bias[n0 + n + j] : v[j];
            const int64_t target = int64_t(m0 + m) * job.w.n + n0 + n + j;
            if (job.out_fp32) {
                static_cast<float*>(job.y)[target] = value;
            } else {
                static_cast<T*>(job.y)[target] = from_float<T>(value);
            }
        }
    }
}

template <class T, int Groups, int Tokens, int Blocks>
__global__ void __launch_bounds__(FusedSizes<Groups, Tokens, Blocks>::kThreads, Blocks)
    fused_kernel(const __grid_constant__ CUtensorMap x_map, const FusedJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Sizes = FusedSizes<Groups, Tokens, Blocks>;
    extern __shared__ uint8_t dynamic[];
    // Static, so that the host can tell this body from the empty one of other architectures.
    __shared__ uint64_t barriers[2 * Sizes::kStages];
    uint8_t* base = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const FusedRing<Groups, Sizes> ring{shared_address(base), shared_address(barriers),
                                        shared_address(barriers + Sizes::kStages)};
    const FusedWork work(job, Sizes::kTiles);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Sizes::kStages; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, Groups * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    launch_dependents();
    if (threadIdx.x >= 128 * Groups) {
        if constexpr (Sizes::kHandsOn) registers_down<Sizes::kCopyRegisters>();
        if (threadIdx.x < 128 * Groups + 32) fused_copies<Groups, Tokens, Sizes>(ring, x_map, job, work);
        if (job.direct) return;
        cluster_meet();
        cluster_meet();
    } else {
        if constexpr (Sizes::kHandsOn) registers_up<Sizes::kProductRegisters>();
        FusedProducts<T, Groups, Tokens, Sizes> products(ring, job);
        for (int i = 0; i < work.count; ++i) {
            const int2 place = FusedWork::place(job, work.first + i * work.step);
            float acc[Tokens / 2];
            products.run(work.begin, work.end, acc);
            if (job.direct) {
                fused_store<T, Tokens, Sizes>(base + Sizes::kRing, job, place, acc);
                continue;
            }
            float* sums = reinterpret_cast<float*>(base);
            meet(1, 128 * Groups);  // nobody reads the ring any more
            fused_leave_sums<Tokens, Sizes>(sums, acc);
            cluster_meet();
            fused_add_up<T, Tokens, Sizes>(sums, job, place);
            cluster_meet();  // nobody leaves while others read its sums
            return;
        }
    }
#endif
}

}  // namespace turbomill::cuda
