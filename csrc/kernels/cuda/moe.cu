// Around the experts: who goes to which, and back.
#include "kernels/cuda/moe_launch.h"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/token_keys.cuh"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kThreads = 256, kSortThreads = 512;

// A warp to a token.
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const float* all_logits, bool normalise, Routing r) {
    allow_next();
    wait_for_previous();
    const int token = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= r.tokens) return;
    const float* logits = all_logits + int64_t(token) * r.experts;
    int* chosen = r.chosen + int64_t(token) * r.top;
    float* weights = r.weights + int64_t(token) * r.top;
    uint64_t bound = ~uint64_t(0);
    float best = 0.f, total = 0.f;
    for (int j = 0; j < r.top; ++j) {
        uint64_t greatest = 0;
        for (int e = lane; e < r.experts; e += 32) {
            const uint64_t key = key_of(logits[e], e);
            if (key < bound && key > greatest) greatest = key;
        }
        for (int mask = 16; mask; mask /= 2) {
            const uint64_t other = __shfl_xor_sync(kFullWarp, greatest, mask);
            if (other > greatest) greatest = other;
        }
        bound = greatest;
        const int expert = id_of(greatest);
        if (j == 0) best = logits[expert];
        const float weight = expf(logits[expert] - best);
        total += weight;
        if (lane == 0) chosen[j] = expert, weights[j] = weight;
    }
    if (!normalise) {
        total = 0.f;
        for (int e = lane; e < r.experts; e += 32) total += expf(logits[e] - best);
        total = warp_sum(total);
    }
    __syncwarp();
    for (int j = lane; j < r.top; j += 32) weights[j] /= total;
}

// A block to an expert: its first place is the number of pairs of the experts before it; its pairs are placed
// in their order.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(Routing r) {
    constexpr int kWarps = kSortThreads / 32;
    __shared__ int counts[kWarps];
    allow_next();
    wait_for_previous();
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = r.tokens * r.top;
    int before = 0;
    for (int p = threadIdx.x; p < all; p += kSortThreads) before += r.chosen[p] < expert;
    for (int mask = 16; mask; mask /= 2) before += __shfl_xor_sync(kFullWarp, before, mask);
    if (lane == 0) counts[warp] = before;
    __syncthreads();
    int place = 0;
    for (int w = 0; w < kWarps; ++w) place += counts[w];
    if (threadIdx.x == 0) {
        r.offsets[expert] = place;
        if (expert == r.experts - 1) r.offsets[r.experts] = all;
    }
    for (int first = 0; first < all; first += kSortThreads) {
        const int p = first + threadIdx.x;
        const bool own = p < all && r.chosen[p] == expert;
        const unsigned owners = __ballot_sync(kFullWarp, own);
        __syncthreads();  // counts were read
        if (lane == 0) counts[warp] = __popc(owners);
        __syncthreads();
        int ahead = __popc(owners & ((1u << lane) - 1u)), here = 0;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) ahead += counts[w];
            here += counts[w];
        }
        if (own) {
            r.pairs[place + ahead] = p;
            r.places[p] = place + ahead;
        }
        place += here;
    }
}

// A block to a place; rows as `Piece`s.
template <class Piece>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Piece* x, Routing r, int pieces, Piece* sorted) {
    allow_next();
    wait_for_previous();
    const Piece* source = x + int64_t(r.pairs[blockIdx.x] / r.top) * pieces;
    Piece* target = sorted + int64_t(blockIdx.x) * pieces;
    for (int i = threadIdx.x; i < pieces; i += kThreads) target[i] = source[i];
}

// A warp to a token.
template <class T>
__global__ void __launch_bounds__(kThreads)
    shared_gate_kernel(const T* x, const T* w, int tokens, int h, float* gate) {
    allow_next();
    wait_for_previous();
    const int token = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    float sum = 0.f;
    for (int i = lane; i < h; i += 32) sum += to_float(x[int64_t(token) * h + i]) * to_float(w[i]);
    sum = warp_sum(sum);
    if (lane == 0) gate[token] = 1.f / (1.f + expf(-sum));
}

// A block to a token. Vector: H is a multiple of eight.
template <class T, bool Vector>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const T* sorted, Routing r, const float* gate, const T* shared, int h, T* y) {
    constexpr int kEach = Vector ? 8 : 1;
    allow_next();
    wait_for_previous();
    const int64_t token = blockIdx.x;
    const int* places = r.places + token * r.top;
    const float* weights = r.weights + token * r.top;
    for (int i = kEach * threadIdx.x; i < h; i += kEach * kThreads) {
        float sum[kEach] = {};
        const auto add = [&](const T* row, float weight) {
            if constexpr (Vector) {
                float v[8];
                load8(row + i, v);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += weight * v[j];
            } else {
                sum[0] += weight * to_float(row[i]);
            }
        };
        for (int j = 0; j < r.top; ++j) add(sorted + int64_t(places[j]) * h, weights[j]);
        if (shared) add(shared + token * h, gate[token]);
        if constexpr (Vector) {
            store8(y + token * h + i, sum);
        } else {
            y[token * h + i] = from_float<T>(sum[0]);
        }
    }
}

}  // namespace

void moe_route(const float* logits, bool normalise, const Routing& routing, cudaStream_t stream) {
    if (routing.tokens == 0) return;
    launch_overlapped(choose_kernel, dim3(blocks_for(routing.tokens, kThreads / 32)), kThreads, 0, stream,
                      "moe_route", logits, normalise, routing);
    launch_overlapped(sort_kernel, dim3(routing.experts), kSortThreads, 0, stream, "moe_route", routing);
}

void moe_gather(DType type, const void* x, const Routing& routing, int h, void* sorted, cudaStream_t stream) {
    if (routing.tokens == 0) return;
    const int64_t bytes = int64_t(h) * int64_t(dtype_bytes(type));
    const dim3 grid(routing.pair_count());
    const auto run = [&]<class Piece>() {
        launch_overlapped(gather_kernel<Piece>, grid, kThreads, 0, stream, "moe_gather",
                          static_cast<const Piece*>(x), routing, int(bytes / int64_t(sizeof(Piece))),
                          static_cast<Piece*>(sorted));
    };
    bytes % 16 == 0 ? run.template operator()<uint4>() : run.template operator()<uint16_t>();
}

void moe_shared_gate(DType type, const void* x, const void* w, int tokens, int h, float* gate,
                     cudaStream_t stream) {
    if (tokens == 0) return;
    with_type(type, [&]<class T>() {
        launch_overlapped(shared_gate_kernel<T>, dim3(blocks_for(tokens, kThreads / 32)), kThreads, 0, stream,
                          "moe_shared_gate", static_cast<const T*>(x), static_cast<const T*>(w), tokens, h,
                          gate);
    });
}

void moe_combine(DType type, const void* sorted, const Routing& routing, const float* gate,
                 const void* shared, int h, void* y, cudaStream_t stream) {
    if (routing.tokens == 0) return;
    with_type(type, [&]<class T>() {
        launch_overlapped(h % 8 == 0 ? combine_kernel<T, true> : combine_kernel<T, false>,
                          dim3(routing.tokens), kThreads, 0, stream, "moe_combine",
                          static_cast<const T*>(sorted), routing, gate, static_cast<const T*>(shared), h,
                          static_cast<T*>(y));
    });
}

}  // namespace turbomill::cuda
