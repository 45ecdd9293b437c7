// Linears of 16-bit weights on Hopper, for the numbers of rows at which reading the weights is what takes
// time: Y^T = W X^T by wgmma with both operands in shared memory. Work, splits of K, launches that overlap
// and the way of results are those of fused_linear.cuh.
#pragma once

#include "kernels/cuda/fused_linear.cuh"

namespace turbomill::cuda {

struct DenseMaps {
    CUtensorMap w;  // [N, K], boxes of [64 warpgroups, 64], swizzled
    CUtensorMap x;  // [rows, K], boxes of [tokens, 64], swizzled
};

// Sizes of a kernel for `Groups` warpgroups of 64 rows and `Tokens` tokens, `Blocks` to a multiprocessor.
template <int Groups, int Tokens, int Blocks>
struct DenseSizes {
    static constexpr int kRows = 64 * Groups, kThreads = 128 * Groups + 32;
    static constexpr int kWeights = kRows * 128, kInput = Tokens * 128, kStage = kWeights + kInput;  // bytes

    // Results on their way out, and sums of a split K, as fused_linear's.
    static constexpr int kPiece = Tokens < 64 ? Tokens : 64, kPieceStride = 72;
    static constexpr int kSumStride = kRows + 4;
    static constexpr bool kPushes = Tokens == 8;
    static constexpr int kPushed = kPushes ? (Tokens + 6) * kSumStride * 4 : 0;
    static constexpr int kSums = kPushes ? 0 : Tokens * kSumStride * 4;
    static constexpr int kStaging = Groups * kPiece * kPieceStride * 2;
    static constexpr int kOut = kStaging > kPushed ? kStaging : kPushed;

    static constexpr int kBudget = 227 / Blocks * 1024 - 1024 - 512;
    static constexpr int kFit = (kBudget - kOut) / kStage;
    static constexpr int kStages = kFit > 16 ? 16 : kFit;
    static constexpr int kRing = kStages * kStage > kSums ? kStages * kStage : kSums;
    static constexpr int kShared = kRing + kOut + 1024;  // the ring begins at a multiple of 1024
    static_assert(kStages >= 3 && kRing + kOut <= kBudget);
};

// Addresses in shared memory.
template <class Sizes>
struct DenseRing {
    unsigned base, full, empty;  // of the data, and of the stages' barriers, 8 bytes each

    __device__ unsigned weights(int stage) const { return base + stage * Sizes::kWeights; }
    __device__ unsigned input(int stage) const { return weights(Sizes::kStages) + stage * Sizes::kInput; }
};

// The copying thread.
template <int Tokens, class Sizes>
__device__ inline void dense_copies(const DenseRing<Sizes>& ring, const DenseMaps& maps, const FusedJob& job,
                                    FusedWork work) {
    prefetch_map(maps.w);
    prefetch_map(maps.x);
    const auto weights = [&](int k, int stage) {
        barrier_expect(ring.full + 8 * stage, Sizes::kStage);
        copy_box(ring.weights(stage), maps.w, 64 * k, work.place.x * Sizes::kRows, ring.full + 8 * stage);
    };
    const auto input = [&](int k, int stage) {
        copy_box(ring.input(stage), maps.x, 64 * k, work.place.y * Tokens, ring.full + 8 * stage);
    };
    if (!work.next(job)) return;
    // Weights do not depend on the kernels before this one.
    const int early = min(Sizes::kStages, work.end - work.begin);
    for (int i = 0; i < early; ++i) weights(work.begin + i, i);
    wait_dependences();
    for (int i = 0; i < early; ++i) input(work.begin + i, i);
    int stage = early % Sizes::kStages, k = work.begin + early;
    unsigned parity = early == Sizes::kStages ? 0 : 1;  // of a stage that nobody has used yet: 1
    do {
        for (; k < work.end; ++k) {
            barrier_wait(ring.empty + 8 * stage, parity);
            weights(k, stage);
            input(k, stage);
            if (++stage == Sizes::kStages) stage = 0, parity ^= 1;
        }
        k = work.begin;
    } while (work.next(job));
}

// A multiplying warp's place in the ring, and its products along it.
template <class T, int Tokens, class Sizes>
class DenseProducts {
  public:
    __device__ explicit DenseProducts(const DenseRing<Sizes>& ring)
        : weights_(swizzled_rows(ring.weights(0) + threadIdx.x / 128 * 8192)),
          input_(swizzled_rows(ring.input(0))),
          full_(ring.full) {
        keep(weights_), keep(input_), keep(full_);
    }

    // acc [64, Tokens] of the warpgroup = its rows of W times X, over tiles [begin, end) of K.
    __device__ void run(int begin, int end, float (&acc)[Tokens / 2]) {
        unsigned done = 0;  // the stage whose products are not known to have ended, by its barrier
        for (int k = begin; k < end; ++k) {
            const unsigned named = full_ + 8 * stage_;
            barrier_wait(named, parity_);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                queue_shared_product<T, Tokens>(
                    acc, describe(weights_ + stage_ * (Sizes::kWeights / 16) + 2 * i),
                    describe(input_ + stage_ * (Sizes::kInput / 16) + 2 * i), k > begin || i > 0);
            products_commit();
            products_wait<1>();
            if (done) release(done);
            done = named;
            if (++stage_ == Sizes::kStages) stage_ = 0, parity_ ^= 1;
        }
        products_wait<0>();
        products_land(acc);
        release(done);
    }

  private:
    // The copying thread may fill a stage again. `empty` barriers lie after the `full` ones.
    __device__ static void release(unsigned named) {
        if (threadIdx.x % 32 == 0) barrier_arrive(named + 8 * Sizes::kStages);
    }

    unsigned weights_, input_, full_;
    int stage_ = 0;
    unsigned parity_ = 0;
};

template <class T, int Groups, int Tokens, int Blocks>
__global__ void __launch_bounds__(DenseSizes<Groups, Tokens, Blocks>::kThreads, Blocks)
    dense_fused_kernel(const __grid_constant__ DenseMaps maps, const FusedJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Sizes = DenseSizes<Groups, Tokens, Blocks>;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[2 * Sizes::kStages];
    uint8_t* base = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const DenseRing<Sizes> ring{shared_address(base), shared_address(barriers),
                                shared_address(barriers + Sizes::kStages)};
    FusedWork work(job, 1, false);
    fused_begin<Groups, Sizes::kStages>(ring);
    launch_dependents();
    if (Sizes::kPushes && !job.direct) cluster_arrive();  // who is running may be sent sums
    if (threadIdx.x >= 128 * Groups) {
        if (threadIdx.x == 128 * Groups) dense_copies<Tokens>(ring, maps, job, work);
        __syncwarp();
        if (job.direct) return;
        fused_attend_exchange<Sizes>();
        return;
    }
    DenseProducts<T, Tokens, Sizes> products(ring);
    while (work.next(job)) {
        float acc[Tokens / 2];
        products.run(work.begin, work.end, acc);
        if (!job.direct) return fused_exchange<T, Groups, Tokens, Sizes>(base, job, work.place, acc);
        fused_store<T, Tokens, Sizes>(base + Sizes::kRing, job,
                                      work.place.x * Sizes::kRows + int(threadIdx.x / 128) * 64,
                                      work.place.y * Tokens, acc);
    }
#endif
}

}  // namespace turbomill::cuda
