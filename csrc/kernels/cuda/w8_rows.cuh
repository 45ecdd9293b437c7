// W8A16 by way of the store's layout: Y^T = W X^T with mma.m16n8k16, weights as the A operand (16 rows of N),
// tokens as the B operand (8 columns). Bound by the bytes of the weight up to some 64 rows.
//
// A block owns 128 rows of N, up to 128 tokens and a range of K. Asynchronous copies fill a ring of stages of
// 128 columns (of 64, with many tokens) a few stages ahead: codes as they lie, the tile of x, scales, and
// zeros or minima. Each warp multiplies 16 or 32 of the rows, so that no code is converted twice.
//
// When N alone does not fill the GPU, K is split over blocks: each writes its partial sums, waits for the
// others of its split and adds a share of them, in order, so that results do not depend on timing. Blocks of
// one split have neighbouring numbers, and blocks start in the order of their numbers: of all splits under
// way at most the last is not whole, and every whole one ends, so that waiting ends, too.
//
// Up to 32 tokens the fragments hold code - zero, which is exact, and a group's products are summed in fp32
// and scaled then: no weight is rounded. With more, weights are rounded to T on their way.
//
// What is issued counts: a multiprocessor's share of the memory's speed leaves some seven lane operations to
// a code. Hence addresses that are made once and only move, and no divisions in the loop.
#pragma once

#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/w8.cuh"

namespace turbomill::cuda {

struct W8Job {
    W8View w;
    const void* x;  // [rows, K]
    const float* bias;
    void* y;  // [rows, N]
    bool out_fp32;
    int rows, stages_per_split;
    unsigned per_group;  // 2^32 / group, rounded up: column / group is the upper half of column * per_group
    float* partial;      // [splits, rows, n_blocks * 128]
    unsigned* counters;  // [n_blocks * m_tiles]
};

// Tokens: tiles of 8 tokens of a block. Whole: no stage has more than one group.
template <class T, int Tokens, bool Whole>
struct W8Sizes {
    static constexpr bool kRounded = Tokens >= 8;
    static constexpr int kSubs = kRounded ? 2 : 1;  // sub-tiles of 16 rows of N of a warp
    static constexpr int kThreads = 256 / kSubs;
    static constexpr int kBlocks = Tokens == 4 || Tokens == 16 ? 2 : 3, kStages = 3;
    static constexpr int kTiles = kRounded ? 1 : 2;       // of 64 columns in a stage
    static constexpr int kSets = Whole ? 1 : 2 * kTiles;  // of parameters: of a stage, or of each 32 columns
    static constexpr int kSteps = 4 * kTiles / kSets;     // of 16 columns that share one
    static constexpr int kCodes = kTiles * 8192, kInput = kTiles * Tokens * 1024, kParams = kSets * 256;
    static constexpr int kStage = kCodes + kInput + 2 * kParams;  // bytes: codes, x, scales, zeros or minima
    static constexpr int kShared = kStages * kStage;
    static constexpr int kSumStride = 132;  // a fragment's stores meet no bank twice
    static_assert(kShared >= 8 * Tokens * kSumStride * 4);
};

// What one thread copies into each stage. Rows in shared memory have 128 bytes, whose chunks of 16 are turned
// so that a quarter of a warp reads from all banks.
template <class T, int Tokens, bool Whole>
class W8Copies {
    using Sizes = W8Sizes<T, Tokens, Whole>;
    static constexpr int kThreads = Sizes::kThreads, kTiles = Sizes::kTiles;
    static constexpr int kInputs = Sizes::kInput / 16 > kThreads ? Sizes::kInput / 16 / kThreads : 1;
    static constexpr int kBeside = 16 * Sizes::kSets;  // threads that copy scales, and as many for zeros

  public:
    // Of 128 rows of N from tile `n_tile` of 64 on, tokens from `first_row` on, K from tile `bk` on.
    __device__ W8Copies(const W8Job& job, int n_tile, int first_row, int bk, const void* beside)
        : bk_(bk), k_tiles_(job.w.k_tiles), k_(job.w.k), rows_(job.rows - first_row) {
        const W8View& w = job.w;
        const int tid = threadIdx.x;
        second_ = n_tile + 1 < (w.n + 63) / 64;  // there may be no second tile of N
        codes_[0] = w.codes + (int64_t(n_tile) * w.k_tiles + bk) * 4096 + tid * 16;
        codes_[1] = codes_[0] + int64_t(w.k_tiles) * 4096;
        codes_to_ = tid / 8 * 128 + ((tid % 8) ^ (tid / 8 % 2 * 4)) * 16;

        const int tile = tid / (64 * Tokens) % kTiles;  // of several chunks of a thread: the first's
        row_ = tid / 8 % (8 * Tokens);
        column_ = 64 * (bk + tile) + tid % 8 * 8;
        input_ = static_cast<const T*>(job.x) + int64_t(first_row + row_) * k_ + column_;
        input_to_ = Sizes::kCodes + tile * Tokens * 1024 + row_ * 128 + ((tid % 8) ^ (row_ % 8)) * 16;

        if (tid >= 2 * kBeside) return;
        const int kind = tid / kBeside, c = tid % kBeside, n = n_tile + c / 8 % 2;
        const void* base = kind == 0 ? w.scales : beside;
        if (!base || (c / 8 % 2 && !second_)) return;
        params_ = static_cast<const uint8_t*>(base) + int64_t(n) * w.groups * 128 + c % 8 * 16;
        params_at_ = 64 * bk + c / 16 * 32;
        params_to_ = Sizes::kCodes + Sizes::kInput + kind * Sizes::kParams + c * 16;
        per_group_ = job.per_group;
    }

    // The next stage's weights to shared address `stage`.
    __device__ void weight(unsigned stage) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                // What is not there meets zeros of x, or makes rows that nobody writes.
                if ((n == 1 && !second_) || (tile > 0 && bk_ + tile >= k_tiles_)) continue;
#pragma unroll
                for (int at = 0; at < 4096; at += 16 * kThreads)
                    w8_copy(stage + codes_to_ + (n * kTiles + tile) * 4096 + at, codes_[n] + tile * 4096 + at,
                            true);
            }
        codes_[0] += kTiles * 4096;
        codes_[1] += kTiles * 4096;
        if (params_) {
            const bool inside = params_at_ < 64 * k_tiles_;
            const unsigned group = inside ? __umulhi(unsigned(params_at_), per_group_) : 0;
            w8_copy(stage + params_to_, params_ + group * 128, inside);
            params_at_ += 64 * kTiles;
        }
        bk_ += kTiles;
    }
    // And its x: asynchronously, or, at the start, when weights are under way that need not be waited for.
    template <bool Async>
    __device__ void input(unsigned stage) {
        if (Sizes::kInput / 16 < kThreads && threadIdx.x >= Sizes::kInput / 16) return;
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
            // Further chunks of a thread are of the next tile, or, of one tile, of later rows.
            constexpr int kRows = kThreads / 8;
            const int tile = kTiles > 1 ? i : 0, row = kTiles > 1 ? 0 : i * kRows;
            const bool inside = row_ + row < rows_ && column_ + 64 * tile < k_;
            const T* from = inside ? input_ + 64 * tile + int64_t(row) * k_ : input_;
            const unsigned to = stage + input_to_ + tile * Tokens * 1024 + row * 128;
            if (Async)
                w8_copy(to, from, inside);
            else
                w8_store(to, inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0));
        }
        input_ += 64 * kTiles;
        column_ += 64 * kTiles;
    }

  private:
    const uint8_t *codes_[2], *params_ = nullptr;
    const T* input_;
    int bk_, row_, column_, params_at_ = 0;
    const int k_tiles_, k_, rows_;
    unsigned codes_to_, input_to_, params_to_ = 0, per_group_ = 0;
    bool second_;
};

template <class T, int Tokens, bool Minima, bool Whole>
class W8Block {
    using Sizes = W8Sizes<T, Tokens, Whole>;
    static constexpr int kSubs = Sizes::kSubs, kThreads = Sizes::kThreads, kTiles = Sizes::kTiles;
    static constexpr int kChains = Tokens < 4 ? 2 : 1;  // sums that products may be added to in turn

  public:
    __device__ W8Block(const W8Job& job, void* ring)
        : job_(job),
          ring_(unsigned(__cvta_generic_to_shared(ring))),
          sums_(static_cast<float*>(ring)),
          bn_(blockIdx.z),
          first_row_(blockIdx.y * 8 * Tokens) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int sub = warp * kSubs;  // of the block's eight
        for (int h = 0; h < 2; ++h)
            codes_at_[h] =
                sub / 4 * kTiles * 4096 + sub % 4 * 1024 + g * 128 + ((4 * h + t) ^ (g % 2 * 4)) * 16;
        for (int j = 0; j < (Tokens == 1 ? 2 : 4); ++j) {  // lane l names row l % 8 of matrix l / 8
            const int chunk = Tokens == 1 ? 4 * j + lane / 8 : 2 * j + lane / 8 % 2;
            input_at_[j] = Sizes::kCodes + (Tokens == 1 ? 0 : lane / 16 * 1024) + lane % 8 * 128 +
                           (chunk ^ (lane % 8)) * 16;
        }
        params_at_ = Sizes::kCodes + Sizes::kInput + sub * 32 + g * 4;
    }

    __device__ void run() {
        const W8View& w = job_.w;
        const int all = (w.k_tiles + kTiles - 1) / kTiles, begin = blockIdx.x * job_.stages_per_split;
        const int count = min(all - begin, job_.stages_per_split);
        W8Copies<T, Tokens, Whole> copies(job_, 2 * bn_, first_row_, begin * kTiles,
                                          Minima ? w.mins : w.zeros);
        // Weights are there before the step begins.
#pragma unroll
        for (int i = 0; i < Sizes::kStages - 1; ++i) {
            if (i < count) copies.weight(ring_ + i * Sizes::kStage);
            commit_copies();
        }
        wait_for_previous();
#pragma unroll
        for (int i = 0; i < Sizes::kStages - 1; ++i)
            if (i < count) copies.template input<false>(ring_ + i * Sizes::kStage);
        const unsigned end = ring_ + Sizes::kShared;
        unsigned stage = ring_, target = end - Sizes::kStage;
        for (int i = 0; i < count; ++i) {
            wait_copies<Sizes::kStages - 2>();
            __syncthreads();  // everyone's copies, and everyone is done with the stage before
            if (i + Sizes::kStages - 1 < count) {
                copies.weight(target);
                copies.template input<true>(target);
            } else {
                allow_next();  // from the start, its blocks would take multiprocessors' room unevenly
            }
            commit_copies();
            multiply(stage);
            target = stage;
            stage = stage + Sizes::kStage == end ? ring_ : stage + Sizes::kStage;
        }
        wait_copies<0>();
        __syncthreads();
        add_up();
    }

  private:
    __device__ void multiply(unsigned stage) {
        const W8View& w = job_.w;
        uint4 codes[kSubs][kTiles][2];
#pragma unroll
        for (int s = 0; s < kSubs; ++s)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    codes[s][tile][h] = w8_load(stage + codes_at_[h] + tile * 4096 + s * 1024);
#pragma unroll
        for (int set = 0; set < Sizes::kSets; ++set) {
            float2 scale[kSubs], beside[kSubs];
#pragma unroll
            for (int s = 0; s < kSubs; ++s) {
                const unsigned at = stage + params_at_ + set * 256 + s * 32;
                scale[s] = w8_pair(w8_load_word(at), w.bf16_params);
                scale[s].x *= ByteShift<T>::kFactor, scale[s].y *= ByteShift<T>::kFactor;
                beside[s] = make_float2(128.f, 128.f);
                if (Minima || w.zeros) beside[s] = w8_pair(w8_load_word(at + Sizes::kParams), w.bf16_params);
            }
            float part[Sizes::kRounded ? 1 : kChains][Sizes::kRounded ? 1 : Tokens][4] = {};
            float inputs[Minima && !Sizes::kRounded ? Tokens : 1][4] = {};  // sums of x alone
            unsigned r[4];
#pragma unroll
            for (int step = set * Sizes::kSteps; step < (set + 1) * Sizes::kSteps; ++step) {
                const int tile = step / 4, j = step % 4;
                unsigned b[Tokens][2];
                if constexpr (Tokens == 1) {  // four matrices are those of two steps
                    if (step % 2 == 0) load_matrices(r, stage + input_at_[j / 2] + tile * 1024);
                    b[0][0] = r[step % 2 * 2], b[0][1] = r[step % 2 * 2 + 1];
                } else {  // of two tiles of tokens
#pragma unroll
                    for (int m = 0; m < Tokens; m += 2) {
                        load_matrices(r, stage + input_at_[j] + (tile * Tokens + m) * 1024);
                        b[m][0] = r[0], b[m][1] = r[1], b[m + 1][0] = r[2], b[m + 1][1] = r[3];
                    }
                }
                if constexpr (Minima && !Sizes::kRounded) {
                    const unsigned one = pack_pair<T>(1.f, 1.f), ones[4] = {one, one, one, one};
#pragma unroll
                    for (int m = 0; m < Tokens; ++m) mma<T>(inputs[m], ones, b[m][0], b[m][1]);
                }
#pragma unroll
                for (int s = 0; s < kSubs; ++s) {
                    const ByteShift<T> upper(Minima ? 0.f : beside[s].x), lower(Minima ? 0.f : beside[s].y);
                    unsigned a[4];
                    upper(word(codes[s][tile][0], j), a[0], a[2]);
                    lower(word(codes[s][tile][1], j), a[1], a[3]);
                    if constexpr (Sizes::kRounded) round(a, scale[s], beside[s]);
#pragma unroll
                    for (int m = 0; m < Tokens; ++m) {
                        if constexpr (Sizes::kRounded)
                            mma<T>(acc_[s][m], a, b[m][0], b[m][1]);
                        else
                            mma<T>(part[step % kChains][m], a, b[m][0], b[m][1]);
                    }
                }
            }
            if constexpr (!Sizes::kRounded) {
#pragma unroll
                for (int m = 0; m < Tokens; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float sum = part[0][m][e];
                        if constexpr (kChains == 2) sum += part[1][m][e];
                        acc_[0][m][e] += sum * (e < 2 ? scale[0].x : scale[0].y);
                        if constexpr (Minima)
                            acc_[0][m][e] += inputs[m][e] * (e < 2 ? beside[0].x : beside[0].y);
                    }
            }
        }
    }

    __device__ static unsigned word(const uint4& v, int i) {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }

    // code - zero to the weight in T.
    __device__ static void round(unsigned (&a)[4], float2 scale, float2 min) {
        using P = typename Pair<T>::type;
        const P scales[2] = {Pair<T>::pack(scale.x, scale.x), Pair<T>::pack(scale.y, scale.y)},
                mins[2] = {Pair<T>::pack(min.x, min.x), Pair<T>::pack(min.y, min.y)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            P& v = reinterpret_cast<P&>(a[e]);
            v = Minima ? __hfma2(v, scales[e % 2], mins[e % 2]) : __hmul2(v, scales[e % 2]);
        }
    }

    // Sums go through shared memory, so that rows of y are written whole.
    __device__ void add_up() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int s = 0; s < kSubs; ++s)
#pragma unroll
            for (int m = 0; m < Tokens; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums_[(8 * m + 2 * t + e % 2) * Sizes::kSumStride + 16 * (warp * kSubs + s) + g +
                          e / 2 * 8] = acc_[s][m][e];
        __syncthreads();
        const int tokens = min(8 * Tokens, job_.rows - first_row_), splits = gridDim.x;
        const int all = tokens * 32;
        for (int i = threadIdx.x; i < all; i += kThreads) {
            const float4 v =
                *reinterpret_cast<const float4*>(sums_ + i / 32 * Sizes::kSumStride + i % 32 * 4);
            if (splits == 1)
                finish(i, v);
            else
                __stcg(partial(blockIdx.x, i), v);
        }
        if (splits == 1) return;
        // Blocks that came are counted in the counter's lower half, those that left in the upper one.
        unsigned* counter = job_.counters + blockIdx.z * gridDim.y + blockIdx.y;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(counter, 1u);
            while ((*static_cast<volatile unsigned*>(counter) & 0xffff) != unsigned(splits)) {
            }
            __threadfence();
        }
        __syncthreads();
        const int share = (all + splits - 1) / splits, begin = blockIdx.x * share;
        for (int i = begin + threadIdx.x; i < min(all, begin + share); i += kThreads) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
            for (int split = 0; split < splits; ++split) {
                const float4 other = __ldcg(partial(split, i));
                v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
            }
            finish(i, v);
        }
        if (threadIdx.x == 0 && atomicAdd(counter, 1u << 16) >> 16 == unsigned(splits - 1)) *counter = 0;
    }

    // Four sums of one split: columns 4 (i % 32) of the block's, of its token i / 32.
    __device__ float4* partial(int split, int i) const {
        const int64_t row = int64_t(split) * job_.rows + first_row_ + i / 32;
        return reinterpret_cast<float4*>(job_.partial + (row * gridDim.z + bn_) * 128 + i % 32 * 4);
    }

    __device__ void finish(int i, float4 sum) const {
        const int n = 128 * bn_ + i % 32 * 4;
        const int64_t at = int64_t(first_row_ + i / 32) * job_.w.n + n;
        const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (n + e >= job_.w.n) return;
            const float value = v[e] + (job_.bias ? job_.bias[n + e] : 0.f);
            if (job_.out_fp32)
                static_cast<float*>(job_.y)[at + e] = value;
            else
                static_cast<T*>(job_.y)[at + e] = from_float<T>(value);
        }
    }

    const W8Job& job_;
    const unsigned ring_;
    float* const sums_;  // [8 * Tokens, 132], in the ring's place
    const int bn_, first_row_;
    unsigned codes_at_[2], input_at_[4], params_at_;  // in a stage: of rows g and g + 8; of a step
    float acc_[kSubs][Tokens][4] = {};
};

template <class T, int Tokens, bool Minima, bool Whole>
__global__ void __launch_bounds__(W8Sizes<T, Tokens, Whole>::kThreads, W8Sizes<T, Tokens, Whole>::kBlocks)
    w8_rows_kernel(const __grid_constant__ W8Job job) {
    extern __shared__ uint4 w8_ring[];
    W8Block<T, Tokens, Minima, Whole>(job, w8_ring).run();
}

}  // namespace turbomill::cuda
