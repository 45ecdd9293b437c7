// Products of experts' dense weights with their rows on Hopper: Y^T = W X^T by wgmma with both operands in
// shared memory, which one thread keeps filled by the copy engine. Two warpgroups of 64 rows of N each;
// thread blocks fill the GPU once and take tiles in turn; results leave as those of w4_fused do, the gate
// with them.
#include "kernels/cuda/fused_linear.cuh"
#include "kernels/cuda/grouped_work.cuh"
#include "kernels/cuda/moe_launch.h"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/tensor_map.h"

namespace turbomill::cuda {

template <int Tokens>
struct GroupedDenseSizes {
    static constexpr int kGroups = 2, kRows = 64 * kGroups, kBlocks = Tokens <= 64 ? 2 : 1;
    // Where accumulators fill the registers, a whole warpgroup copies, to hand most of its own on.
    static constexpr bool kHandsOn = Tokens == 256;
    static constexpr int kThreads = 128 * kGroups + (kHandsOn ? 128 : 32);
    static constexpr int kCopyRegisters = 40, kProductRegisters = 232;
    static constexpr int kWeights = kRows * 128, kInput = Tokens * 128, kStage = kWeights + kInput;  // bytes
    // Of results on their way out, as fused_store wants them.
    static constexpr int kPiece = Tokens < 64 ? Tokens : 64, kPieceStride = 72;
    static constexpr int kOut = kGroups * kPiece * kPieceStride * 2;
    static constexpr int kBudget = (kBlocks == 1 ? 227 : 113) * 1024 - 1024 - 512;
    static constexpr int kStages = (kBudget - kOut) / kStage;
    static constexpr int kRing = kStages * kStage, kShared = kRing + kOut + 1024;
    static_assert(kStages >= 3);
};

namespace {

template <int Tokens>
using Sizes = GroupedDenseSizes<Tokens>;

struct Maps {
    CUtensorMap w;  // [E * N, K], boxes of [128, 64], swizzled
    CUtensorMap x;  // [rows, K], boxes of [tokens, 64], swizzled
};

// Barriers of the ring's stages, 8 bytes each.
struct Ring {
    unsigned base, full, empty;
};

template <int Tokens>
__device__ inline void copy_tiles(const Ring& ring, const Maps& maps, const GroupedJob& job) {
    using S = Sizes<Tokens>;
    int stage = 0;
    unsigned parity = 1;  // of a stage that nobody has used yet
    for (GroupedWork<Tokens> work(job); work.next();) {
        const int n = work.expert * job.fused.w.n + work.place.x * S::kRows;
        const int row = work.first_row + work.place.y * Tokens;
        for (int k = 0; k < job.fused.w.k_tiles; ++k) {
            const unsigned full = ring.full + 8 * stage, to = ring.base + stage * S::kStage;
            barrier_wait(ring.empty + 8 * stage, parity);
            barrier_expect(full, S::kStage);
            copy_box(to, maps.w, 64 * k, n, full);
            copy_box(to + S::kWeights, maps.x, 64 * k, row, full);
            if (++stage == S::kStages) stage = 0, parity ^= 1;
        }
    }
}

template <class T, int Tokens>
__device__ inline void multiply_tiles(const Ring& ring, uint8_t* staging, const GroupedJob& job) {
    using S = Sizes<Tokens>;
    const int columns = job.fused.gated ? job.fused.w.n / 2 : job.fused.w.n;
    const unsigned weights = swizzled_rows(ring.base + threadIdx.x / 128 * 64 * 128),
                   input = swizzled_rows(ring.base + S::kWeights);
    int stage = 0;
    unsigned parity = 0;
    for (GroupedWork<Tokens> work(job); work.next();) {
        float acc[Tokens / 2];
        unsigned done = 0;  // the stage whose products are not known to have ended, by its barrier
        for (int k = 0; k < job.fused.w.k_tiles; ++k) {
            barrier_wait(ring.full + 8 * stage, parity);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                queue_shared_product<T, Tokens>(acc, describe(weights + stage * (S::kStage / 16) + 2 * i),
                                                describe(input + stage * (S::kStage / 16) + 2 * i),
                                                k > 0 || i > 0);
            products_commit();
            products_wait<1>();
            if (done && threadIdx.x % 32 == 0) barrier_arrive(done);
            done = ring.empty + 8 * stage;
            if (++stage == S::kStages) stage = 0, parity ^= 1;
        }
        products_wait<0>();
        products_land(acc);
        if (threadIdx.x % 32 == 0) barrier_arrive(done);
        FusedJob expert = job.fused;
        expert.y = static_cast<T*>(expert.y) + int64_t(work.first_row) * columns;
        expert.rows = work.rows;
        fused_store<T, Tokens, S>(staging, expert, work.place.x * S::kRows + int(threadIdx.x / 128) * 64,
                                  work.place.y * Tokens, acc);
    }
}

template <class T, int Tokens>
__global__ void __launch_bounds__(Sizes<Tokens>::kThreads, Sizes<Tokens>::kBlocks)
    dense_kernel(const __grid_constant__ Maps maps, const GroupedJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using S = Sizes<Tokens>;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[2 * S::kStages];
    uint8_t* base = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const Ring ring{shared_address(base), shared_address(barriers), shared_address(barriers + S::kStages)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, S::kGroups * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    allow_next();
    wait_for_previous();  // which wrote the offsets
    if (threadIdx.x >= 128 * S::kGroups) {
        if constexpr (S::kHandsOn) registers_down<S::kCopyRegisters>();
        if (threadIdx.x == 128 * S::kGroups) copy_tiles<Tokens>(ring, maps, job);
    } else {
        if constexpr (S::kHandsOn) registers_up<S::kProductRegisters>();
        multiply_tiles<T, Tokens>(ring, base + S::kRing, job);
    }
#endif
}

template <class T, int Tokens>
void launch(Maps maps, GroupedJob job, DType type, const void* x, int k, int multiprocessors,
            cudaStream_t stream) {
    using S = Sizes<Tokens>;
    const auto kernel = dense_kernel<T, Tokens>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
          "a kernel's shared memory");
    maps.x = make_map<2>(map_type(type), x, {cuuint64_t(k), cuuint64_t(job.fused.rows)}, {cuuint64_t(k) * 2},
                         {64, Tokens}, CU_TENSOR_MAP_SWIZZLE_128B);
    job.fused.n_blocks = blocks_for(job.fused.w.n, S::kRows);
    launch_overlapped(kernel, dim3(grouped_blocks(job, Tokens, multiprocessors * S::kBlocks)), S::kThreads,
                      S::kShared, stream, "grouped_dense_fused", maps, job);
}

}  // namespace

bool grouped_dense_fused_fits(DType type, int k) {
    return type != DType::F32 && k % 8 == 0 && w4_fused_runs();
}

void grouped_dense_fused(DType type, const void* w, int n, int k, const void* x, void* y,
                         const ExpertRows& rows, int multiprocessors, bool gated, cudaStream_t stream) {
    if (rows.rows == 0) return;
    if (gated && n % 16) throw std::invalid_argument("grouped_dense_fused: gates come by eights");
    GroupedJob job{};
    job.fused.w.n = n;
    job.fused.w.k_tiles = blocks_for(k, 64);
    job.fused.y = y;
    job.fused.gated = gated;
    job.fused.rows = rows.rows;
    job.offsets = rows.offsets;
    job.experts = rows.experts;
    Maps maps{};
    maps.w = make_map<2>(map_type(type), w, {cuuint64_t(k), cuuint64_t(n) * rows.experts},
                         {cuuint64_t(k) * 2}, {64, 128}, CU_TENSOR_MAP_SWIZZLE_128B);
    with_half_type(type, [&]<class T>() {
        const auto run = [&]<int Tokens>() {
            launch<T, Tokens>(maps, job, type, x, k, multiprocessors, stream);
        };
        // As w4_grouped.cu chooses.
        const double tokens = 1.5 * rows.rows / rows.experts;
        if (tokens <= 32) return run.template operator()<32>();
        if (tokens <= 64) return run.template operator()<64>();
        if (tokens <= 128) return run.template operator()<128>();
        run.template operator()<256>();
    });
}

}  // namespace turbomill::cuda
