// The multiplying warps of the fused kernels: from the ring in shared memory to sums in registers.
#pragma once

#include "kernels/cuda/fused_codes.cuh"
#include "kernels/cuda/fused_linear.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace turbomill::cuda {

// Sizes of a kernel for codes of `Bits` bits, `Groups` warpgroups of 64 rows and `Tokens` tokens, `Blocks` to
// a multiprocessor. Whole: a stage of the ring lies in one group of scales; otherwise groups are of 32 or 64.
template <int Bits, int Groups, int Tokens, int Blocks, bool Whole>
struct FusedSizes {
    static constexpr int kBits = Bits;
    static constexpr int kRows = 64 * Groups;
    // Where accumulators fill the registers, a whole warpgroup copies, to hand most of its own on. (With room
    // to spare, the compiler carries descriptors there by an instruction for each half of each: 128 tokens,
    // too.)
    static constexpr bool kHandsOn = Tokens >= 128 || (Groups == 4 && Tokens == 64);
    static constexpr int kThreads = 128 * Groups + (kHandsOn ? 128 : 32);
    static constexpr int kCopyRegisters = Groups == 2 ? 40 : 32;
    static constexpr int kProductRegisters = Groups == 2 ? 232 : Groups == 3 ? 152 : 112;

    static constexpr bool kByWarps = FusedKernel{Groups, Tokens, Blocks}.by_warps();

    // A stage of the ring: tiles of 64 of K.
    static constexpr int kTiles = fused_stage_tiles({Groups, Tokens, Blocks});
    static constexpr int kInput = Tokens * 128;                     // bytes of x, of a tile
    static constexpr int kCodes = kTiles * CodeTile<Bits>::kBytes;  // of codes, of 64 rows of N
    static constexpr int kParams = Whole ? 128 : kTiles * 256;  // of scales, and as many of zeros, likewise
    static constexpr int kStage = kTiles * kInput + Groups * (kCodes + 2 * kParams);
    // Codes become fragments and are multiplied in two steps a stage: while one runs, the next is made.
    static constexpr int kStepWords = 2 * kTiles;

    // Results on their way out: a warpgroup's, kPiece tokens at a time.
    static constexpr int kMostPiece = Bits == 8 && Tokens == 64 ? 32 : 64;  // leaves room for a stage more
    static constexpr int kPiece = Tokens < kMostPiece ? Tokens : kMostPiece, kPieceStride = 72;
    static constexpr int kSumStride = kRows + 4;  // of a token's fp32 sums: no two lanes meet in a bank
    // Sums of a split K. Of eight tokens, each block gets those of some from all others, in a place of its
    // own: splits * ceil(tokens / splits) of them. Of more, they lie in the ring's place, for others to read.
    static constexpr bool kPushes = Tokens == 8;
    static constexpr int kPushed = kPushes ? (Tokens + 6) * kSumStride * 4 : 0;
    static constexpr int kSums = kPushes ? 0 : Tokens * kSumStride * 4;
    static constexpr int kStaging = Groups * kPiece * kPieceStride * 2;
    static constexpr int kOut = kStaging > kPushed ? kStaging : kPushed;

    static constexpr int kBudget = (Blocks == 1 ? 227 : 113) * 1024 - 1024 - 512;
    static constexpr int kFit = (kBudget - kOut) / kStage;
    static constexpr int kStages = kFit > 12 ? 12 : kFit;
    static constexpr int kRing = kStages * kStage > kSums ? kStages * kStage : kSums;
    static constexpr int kShared = kRing + kOut + 1024;  // the ring begins at a multiple of 1024
    static_assert(kStages >= 3 && kRing + kOut <= kBudget);
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

// Keeps the compiler from computing an address anew, from the thread's number, wherever it is used.
__device__ inline void keep(unsigned& address) {
    asm volatile("" : "+r"(address));
}

// Where a multiplying warp finds its part of a stage.
template <class T, int Groups, bool Whole, class Sizes>
struct RingReader {
    static constexpr int kBits = Sizes::kBits;
    static constexpr bool kMinima = kBits == 8 && !Whole;  // whether there are kernels for minima
    using Codes = CodeTile<kBits>;
    using Shifted = ShiftedCodes<T, kBits>;
    using Scaled = ScaledCodes<T, kBits, kMinima>;

    unsigned codes, params, full, lane;
    bool zeros, halves, minima;
    int stage = 0;
    unsigned parity = 0;

    __device__ RingReader(const FusedRing<Groups, Sizes>& ring, const FusedJob& job) {
        const int group = threadIdx.x / 128, sub = threadIdx.x / 32 % 4;
        lane = threadIdx.x % 32;
        const int stage_groups = Whole ? 1 : Sizes::kTiles * 64 / job.w.group;
        codes = ring.codes(0) + group * Sizes::kCodes + Codes::lane_at(sub, lane);
        params = ring.params(0) + group * stage_groups * 128 + sub * 32 + lane / 4 * 4;
        full = ring.full;
        zeros = job.w.zeros;
        minima = kMinima && job.minima;
        halves = job.w.group == 32;
        keep(codes), keep(params), keep(full), keep(lane);
    }

    // Waits for the stage; returns the address that names it when it is released.
    __device__ unsigned wait() const {
        barrier_wait(full + 8 * stage, parity);
        return full + 8 * stage;
    }
    __device__ Codes read_codes(int tile) const {
        Codes read;
        read.read(codes + stage * (Groups * Sizes::kCodes) + tile * Codes::kBytes);
        return read;
    }
    __device__ unsigned first_params() const { return params + stage * (2 * Groups * Sizes::kParams); }
    __device__ unsigned read_zeros(unsigned at) const {
        return zeros ? load_shared_4(at + Groups * Sizes::kParams) : Shifted::kMiddle;
    }
    __device__ Scaled read_scaled(unsigned at) const {
        const unsigned scales = load_shared_4(at), beside = read_zeros(at);
        return Scaled(scales, minima ? 0 : beside, minima ? beside : 0);
    }
    __device__ void advance() {
        if (++stage == Sizes::kStages) stage = 0, parity ^= 1;
    }
    // The copying thread may fill a stage again. `empty` barriers lie after the `full` ones.
    __device__ void release(unsigned named) const {
        if (lane == 0) barrier_arrive(named + 8 * Sizes::kStages);
    }
};

// A multiplying warp's products along the ring, with wgmma: weights are rounded to T.
template <class T, int Groups, int Tokens, bool Whole, class Sizes>
class GroupProducts {
  public:
    using Reader = RingReader<T, Groups, Whole, Sizes>;

    // From token `first` of the ring's on.
    __device__ explicit GroupProducts(const FusedRing<Groups, Sizes>& ring, int first = 0)
        : rows_(swizzled_rows(ring.input(0) + first * 128)) {}

    // acc [64, Tokens] of the warpgroup = its rows of W times X, over tiles [begin, end) of K.
    __device__ void run(Reader& at, int begin, int end, float (&acc)[Tokens / 2]) const {
        constexpr int kTiles = Sizes::kTiles;
        constexpr bool kLate =
            Sizes::kBits == 8;  // a second tile's codes are read late, for want of registers
        unsigned a[2][Sizes::kStepWords][4];
        unsigned done = 0;  // the stage whose products are not known to have ended, by name
#pragma unroll 1            // unrolled, it computes descriptors anew
        for (int k = begin; k < end; k += kTiles) {
            const unsigned named = at.wait(), rows = rows_ + at.stage * (kTiles * Sizes::kInput / 16);
            typename Reader::Codes codes[kTiles];
#pragma unroll
            for (int tile = 0; tile < (kLate ? 1 : kTiles); ++tile) codes[tile] = at.read_codes(tile);
            unsigned params = at.first_params();
            typename Reader::Scaled scaled = at.read_scaled(params);
            const auto next_params = [&] { params += 128, scaled = at.read_scaled(params); };
            if constexpr (kTiles == 1) {
                scaled(codes[0], 0, a[0][0]);
                scaled(codes[0], 1, a[0][1]);
                multiply(a[0], rows, k > begin, acc);
                if (done) at.release(done);
                if (!Whole && at.halves) next_params();
                scaled(codes[0], 2, a[1][0]);
                scaled(codes[0], 3, a[1][1]);
                multiply(a[1], rows + 64 / 16, true, acc);
            } else {
                scaled(codes[0], 0, a[0][0]);
                scaled(codes[0], 1, a[0][1]);
                if (!Whole && at.halves) next_params();
                scaled(codes[0], 2, a[0][2]);
                scaled(codes[0], 3, a[0][3]);
                if (kLate) codes[1] = at.read_codes(1);
                multiply(a[0], rows, k > begin, acc);
                if (done) at.release(done);
                if (!Whole) next_params();
                scaled(codes[1], 0, a[1][0]);
                scaled(codes[1], 1, a[1][1]);
                if (!Whole && at.halves) next_params();
                scaled(codes[1], 2, a[1][2]);
                scaled(codes[1], 3, a[1][3]);
                multiply(a[1], rows + Sizes::kInput / 16, true, acc);
            }
            done = named;
            at.advance();
        }
        products_wait<0>();
        products_land(acc);
        at.release(done);
    }

  private:
    // Queues a step's products, and waits for those before.
    __device__ void multiply(const unsigned (&a)[Sizes::kStepWords][4], unsigned rows, int add,
                             float (&acc)[Tokens / 2]) const {
        products_begin();
#pragma unroll
        for (int j = 0; j < Sizes::kStepWords; ++j)
            queue_product<T, Tokens>(acc, a[j], describe(rows + 32 * j / 16), j > 0 ? 1 : add);
        products_commit();
        products_wait<1>();
    }

    unsigned rows_;
};

// The same with mma, where a warp waits for nobody else. A group's products of code - zero, which is exact,
// are summed and scaled then: no weight is rounded.
template <class T, int Groups, int Tokens, bool Whole, class Sizes>
class WarpProducts {
  public:
    using Reader = RingReader<T, Groups, Whole, Sizes>;

    __device__ explicit WarpProducts(const FusedRing<Groups, Sizes>& ring) {
        // Lane 8q + r names row r of the q-th eight columns, which the copy engine's swizzle puts at q ^ r.
        const int row = threadIdx.x % 8, eight = threadIdx.x % 32 / 8;
        input_ = ring.input(0) + row * 128 + (eight ^ row) * 16;
        keep(input_);
    }

    // acc [16, Tokens] of the warp = its rows of W times X, over tiles [begin, end) of K.
    __device__ void run(Reader& at, int begin, int end, float (&acc)[Tokens / 2]) const {
        constexpr int kTiles = Sizes::kTiles;
#pragma unroll
        for (float& v : acc) v = 0.f;
        for (int k = begin; k < end; k += kTiles) {
            const unsigned named = at.wait();
            typename Reader::Codes codes[kTiles];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) codes[tile] = at.read_codes(tile);
            unsigned params = at.first_params();
            unsigned scales = load_shared_4(params);
            Shifted shifted(at.read_zeros(params));
            // Of one group of scales, tile by tile: two chains of products take half of one's time.
            float parts[kTiles][Tokens / 2] = {};
            const auto next_params = [&](int tile) {
                add_scaled(parts[tile], scales, acc);
#pragma unroll
                for (float& v : parts[tile]) v = 0.f;
                params += 128;
                scales = load_shared_4(params);
                shifted = Shifted(at.read_zeros(params));
            };
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const unsigned input = input_ + (at.stage * kTiles + tile) * Sizes::kInput;
                if (!Whole && tile > 0) next_params(tile - 1);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (!Whole && half > 0 && at.halves) next_params(tile);
                    unsigned a[2][4];
                    fragment(shifted, codes[tile], 2 * half, a[0]);
                    fragment(shifted, codes[tile], 2 * half + 1, a[1]);
#pragma unroll
                    for (int m = 0; m < Tokens / 8; ++m) {
                        unsigned b[4];
                        load_matrices(b, (input + m * 1024) ^ (64 * half));
                        float (&d)[4] = reinterpret_cast<float (&)[4]>(parts[tile][4 * m]);
                        mma<T>(d, a[0], b[0], b[1]);
                        mma<T>(d, a[1], b[2], b[3]);
                    }
                }
            }
            __syncwarp();
            at.release(named);
            if constexpr (Whole) {
#pragma unroll
                for (int i = 0; i < Tokens / 2; ++i) parts[kTiles - 1][i] += parts[0][i];
            }
            add_scaled(parts[kTiles - 1], scales, acc);
            at.advance();
        }
    }

  private:
    using Shifted = typename Reader::Shifted;
    using Two = typename Shifted::Two;

    __device__ static void fragment(const Shifted& shifted, const typename Reader::Codes& codes, int j,
                                    unsigned (&a)[4]) {
        Two w[4];
        shifted(codes, j, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = reinterpret_cast<const unsigned&>(w[i]);
    }
    __device__ static void add_scaled(const float (&part)[Tokens / 2], unsigned scales,
                                      float (&acc)[Tokens / 2]) {
        float2 scale = Pair<T>::unpack(reinterpret_cast<const Two&>(scales));
        scale.x *= Shifted::kFactor, scale.y *= Shifted::kFactor;
#pragma unroll
        for (int i = 0; i < Tokens / 2; ++i) acc[i] += part[i] * (i / 2 % 2 ? scale.y : scale.x);
    }

    unsigned input_;
};

}  // namespace turbomill::cuda
