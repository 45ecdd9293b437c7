// How thread blocks add up tiles that they have parts of, when the stages of all tiles lie in one line and the
// blocks take equal shares of it (FusedWork): through a workspace in memory, which the L2 cache holds.
//
// A value says by itself that it has come: nobody's sums have the bits kNotHere, which all of the workspace
// holds before and after every launch. So a value needs one way there and no flag behind it, and blocks need
// no barrier. Sums are added in the same order every time.
//
// Safe with launches that overlap: a block writes here after its first products, so after the kernels before
// it are done, and every block of a launch is running before a block of the next one can start.
#pragma once

#include <utility>

#include "kernels/cuda/w4_fused_products.cuh"

namespace turbomill::cuda {

inline constexpr unsigned kNotHere = 0xffffffffu;  // a NaN that no operation results in

// The thread blocks that have parts of a tile, and those of them that add up: all but a last one that goes on
// to another tile, and so has sent its part by the time that the others are done.
struct FusedShare {
    int parts, adders;
    int me;

    __device__ FusedShare(const FusedJob& job, int tile) {
        const int begin = tile * job.stages, end = begin + job.stages;
        const int first = begin / job.share, last = (end - 1) / job.share;
        parts = last - first + 1;
        const bool ends = min((last + 1) * job.share, job.n_blocks * job.m_tiles * job.stages) == end;
        adders = max(1, parts - !ends);
        me = int(blockIdx.x) - first;
    }
};

template <int Offset>
__device__ inline void store_sums(float4* at, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0 + %5], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "n"(Offset)
                 : "memory");
}
template <int Offset>
__device__ inline float4 load_sums(const float4* at) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at), "n"(Offset)
                 : "memory");
    return v;
}
__device__ inline bool not_here(float v) {
    return __float_as_uint(v) == kNotHere;
}
__device__ inline float sendable(float v) {
    return not_here(v) ? __uint_as_float(0x7fffffffu) : v;
}

// Waits for the `wanted` first of N groups of four sums and leaves their places as they were before the launch:
// the first Run of them lie from `head` on, Stride bytes apart, as do the next from `rest` + Far on, and so on.
template <int Run, int Stride, int Far, int N>
__device__ inline void await_sums(float4 (&v)[N], float4* head, float4* rest, int wanted) {
    const auto each = [&](auto&& use) {
        [&]<size_t... I>(std::index_sequence<I...>) {
            ((int(I) < wanted ? use.template operator()<int(I)>() : void()), ...);
        }(std::make_index_sequence<N>());
    };
    const auto load = [&]<int I>() {
        v[I] = load_sums<I / Run * Far + I % Run * Stride>(I < Run ? head : rest);
    };
    bool missing;
    do {
        missing = false;
        each(load);
        each([&]<int I>() {
            missing |= not_here(v[I].x) || not_here(v[I].y) || not_here(v[I].z) || not_here(v[I].w);
        });
    } while (missing);
    const float none = __uint_as_float(kNotHere);
    each([&]<int I>() {
        store_sums<I / Run * Far + I % Run * Stride>(I < Run ? head : rest, {none, none, none, none});
    });
}

// The sums of a tile that one thread adds up, of `Tokens` by 64 * Groups, and their places in the workspace:
// [thread block, whether it has the beginning of K, chunk of eight tokens, thread] of four sums.
template <int Groups, int Tokens>
class FusedExchange {
  public:
    __device__ FusedExchange(const FusedJob& job, const FusedShare& share, int tokens)
        : share_(share), chunks_((tokens + 8 * kRun - 1) / (8 * kRun) * kRun) {
        first_ = job.exchange + size_t(int(blockIdx.x) - share.me) * 2 * kPart + threadIdx.x;
    }

    // Sends all of this block's sums.
    __device__ void send(const float (&acc)[Tokens / 2]) const {
        float4* at = part(share_.me);
        [&]<size_t... I>(std::index_sequence<I...>) {
            ((int(I) < chunks_
                  ? store_sums<int(I) * kChunk * 16>(at, {sendable(acc[4 * I]), sendable(acc[4 * I + 1]),
                                                          sendable(acc[4 * I + 2]), sendable(acc[4 * I + 3])})
                  : void()),
             ...);
        }(std::make_index_sequence<kChunks>());
    }

    // Adds the only other block's sums to this one's.
    __device__ void add_other(float (&acc)[Tokens / 2]) const {
#pragma unroll
        for (int first = 0; first < kChunks; first += kAtOnce) {
            float4 v[kAtOnce] = {};
            float4* at = part(1) + first * kChunk;
            await_sums<1, 0, kChunk * 16>(v, at, at, chunks_ - first);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) add(acc + 4 * (first + i), v[i]);
        }
    }

    static constexpr int kRun = Tokens >= 128 ? 2 : 1;  // chunks that a block adds up together

    // use(first token, sums) for each run of chunks that is this block's to add up, in the order of K.
    template <class Use>
    __device__ void add_up(Use&& use) const {
        for (int chunk = share_.me * kRun; chunk < chunks_; chunk += share_.adders * kRun) {
            float acc[4 * kRun] = {};
            float4* rest = first_ + chunk * kChunk;
            for (int from = 0; from < share_.parts; from += kParts, rest += kParts * 2 * kPart) {
                float4 v[kParts * kRun] = {};
                await_sums<kRun, kChunk * 16, 2 * kPart * 16>(v, from ? rest : rest + kPart, rest,
                                                              (share_.parts - from) * kRun);
#pragma unroll
                for (int i = 0; i < kParts * kRun; ++i) add(acc + i % kRun * 4, v[i]);
            }
            use(8 * chunk, acc);
        }
    }

  private:
    static constexpr int kChunk = 128 * Groups, kChunks = Tokens / 8, kPart = kChunks * kChunk;
    static constexpr int kAtOnce = kChunks < 4 ? kChunks : Tokens >= 64 && Groups > 2 || Tokens == 64 ? 4 : kChunks < 8 ? kChunks : 8;
    // Parts whose sums are waited for together, as registers allow.
    static constexpr int kParts = Tokens <= 16 && Groups > 2 ? 4 : 8 / kRun;

    __device__ float4* part(int number) const { return first_ + (number ? 2 * number : 1) * kPart; }
    const FusedShare share_;
    const int chunks_;  // that have tokens
    float4* first_;     // this thread's of the first part's block

    __device__ static void add(float* acc, const float4& v) {
        acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
    }
};

}  // namespace turbomill::cuda
