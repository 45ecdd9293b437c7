// Products of experts' dense weights with their rows, Y^T = W X^T: on the tensor cores for 16-bit types, else
// with fp32 arithmetic. A block owns rows of N of one expert and walks over the expert's tokens, whose number
// it reads from memory; blocks of experts without tokens leave at once.
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/moe_launch.h"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 8, kRows = 128, kDepth = 64;  // of N, and of K at a time
constexpr int kStride = kDepth + 8;  // of a row in shared memory: ldmatrix meets no bank twice

// Tokens of a tile, and how warps share it: RowWarps along N, the rest along tokens.
template <int Tokens>
struct Sizes {
    static constexpr int kRowWarps = Tokens >= 64 ? 4 : 8, kTokenWarps = kWarps / kRowWarps;
    static constexpr int kWarpRows = kRows / kRowWarps, kWarpTokens = Tokens / kTokenWarps;
    static constexpr int kStages = Tokens >= 64 ? 3 : 4;
    static constexpr int kStage = (kRows + Tokens) * kStride;  // elements: weights, then x
    static constexpr int kShared = kStages * kStage * 2;
};

struct Job {
    const void *w, *x;  // [E, N, K], [rows, K]
    void* y;            // [rows, N]
    const int* offsets;
    int n, k;
};

// Asks for rows [0, count) of `Rows`, columns [column, column + 64); what lies outside becomes zeros.
template <class T, int Rows>
__device__ inline void request_tile(T* tile, const T* source, int count, int k, int column) {
    static_assert(Rows * 8 % (kWarps * 32) == 0 || Rows * 8 < kWarps * 32);
    for (int i = threadIdx.x; i < Rows * 8; i += kWarps * 32) {
        const int row = i / 8, at = column + i % 8 * 8;
        const bool inside = row < count && at < k;
        copy_async(tile + row * kStride + i % 8 * 8, inside ? source + int64_t(row) * k + at : source,
                   inside ? 16 : 0);
    }
}

template <class T, int Tokens>
__global__ void __launch_bounds__(kWarps * 32, Tokens >= 64 ? 1 : 2) tensor_kernel(Job job) {
    using S = Sizes<Tokens>;
    extern __shared__ uint4 shared[];
    T* stages = reinterpret_cast<T*>(shared);
    allow_next();
    wait_for_previous();
    const int expert = blockIdx.y, begin = job.offsets[expert], end = job.offsets[expert + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * kRows, k = job.k, steps = (k + kDepth - 1) / kDepth;
    const int row0 = warp / S::kTokenWarps * S::kWarpRows, token0 = warp % S::kTokenWarps * S::kWarpTokens;
    const T* w = static_cast<const T*>(job.w) + (int64_t(expert) * job.n + n0) * k;
    for (int first = begin; first < end; first += Tokens) {
        const int count = min(Tokens, end - first);
        const T* x = static_cast<const T*>(job.x) + int64_t(first) * k;
        const auto request = [&](int step) {
            if (step < steps) {
                T* stage = stages + step % S::kStages * S::kStage;
                request_tile<T, kRows>(stage, w, job.n - n0, k, step * kDepth);
                request_tile<T, Tokens>(stage + kRows * kStride, x, count, k, step * kDepth);
            }
            commit_copies();
        };
        float acc[S::kWarpRows / 16][S::kWarpTokens / 8][4] = {};
        __syncthreads();  // the tile before is done with the stages
        for (int i = 0; i < S::kStages - 1; ++i) request(i);
        for (int step = 0; step < steps; ++step) {
            wait_copies<S::kStages - 2>();
            __syncthreads();
            request(step + S::kStages - 1);
            const T* weights = stages + step % S::kStages * S::kStage;
            const T* input = weights + kRows * kStride;
#pragma unroll
            for (int d = 0; d < kDepth; d += 16) {
                unsigned a[S::kWarpRows / 16][4];
#pragma unroll
                for (int i = 0; i < S::kWarpRows / 16; ++i)
                    load_matrices(a[i], weights + (row0 + 16 * i + lane % 16) * kStride + d + lane / 16 * 8);
#pragma unroll
                for (int j = 0; j < S::kWarpTokens / 8; j += 2) {
                    unsigned b[4];
                    load_matrices(b, input + (token0 + 8 * j + lane / 16 * 8 + lane % 8) * kStride + d +
                                         lane / 8 % 2 * 8);
#pragma unroll
                    for (int i = 0; i < S::kWarpRows / 16; ++i) {
                        mma<T>(acc[i][j], a[i], b[0], b[1]);
                        mma<T>(acc[i][j + 1], a[i], b[2], b[3]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < S::kWarpRows / 16; ++i)
#pragma unroll
            for (int j = 0; j < S::kWarpTokens / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int token = token0 + 8 * j + 2 * t + e % 2, n = n0 + row0 + 16 * i + g + e / 2 * 8;
                    if (token < count && n < job.n)
                        static_cast<T*>(job.y)[int64_t(first + token) * job.n + n] =
                            from_float<T>(acc[i][j][e]);
                }
    }
}

// Any type and size: 32 rows of N by 32 tokens to a block, four results to a thread.
template <class T>
__global__ void __launch_bounds__(256) plain_kernel(Job job) {
    constexpr int kTile = 32;
    __shared__ float weights[kTile][kTile + 1], input[kTile][kTile + 1];
    allow_next();
    wait_for_previous();
    const int expert = blockIdx.y, begin = job.offsets[expert], end = job.offsets[expert + 1];
    const int n0 = blockIdx.x * kTile, column = threadIdx.x % 32, group = threadIdx.x / 32;
    const T* w = static_cast<const T*>(job.w) + int64_t(expert) * job.n * job.k;
    const T* x = static_cast<const T*>(job.x);
    for (int first = begin; first < end; first += kTile) {
        float acc[4] = {};
        for (int k = 0; k < job.k; k += kTile) {
            __syncthreads();
            for (int row = group; row < kTile; row += 8) {
                const bool inside = k + column < job.k;
                weights[row][column] =
                    inside && n0 + row < job.n ? to_float(w[int64_t(n0 + row) * job.k + k + column]) : 0.f;
                input[row][column] = inside && first + row < end
                                         ? to_float(x[int64_t(first + row) * job.k + k + column])
                                         : 0.f;
            }
            __syncthreads();
            for (int i = 0; i < kTile; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[j] += weights[column][i] * input[group + 8 * j][i];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int token = first + group + 8 * j;
            if (token < end && n0 + column < job.n)
                static_cast<T*>(job.y)[int64_t(token) * job.n + n0 + column] = from_float<T>(acc[j]);
        }
    }
}

template <class T, int Tokens>
void launch_tensor(const Job& job, int experts, cudaStream_t stream) {
    const auto kernel = tensor_kernel<T, Tokens>;
    constexpr int kShared = Sizes<Tokens>::kShared;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "grouped_dense's shared memory");
    launch_overlapped(kernel, dim3(blocks_for(job.n, kRows), experts), kWarps * 32, kShared, stream,
                      "grouped_dense", job);
}

}  // namespace

void grouped_dense(DType type, const void* w, int n, int k, const void* x, void* y, const ExpertRows& rows,
                   cudaStream_t stream) {
    if (rows.rows == 0) return;
    const Job job{w, x, y, rows.offsets, n, k};
    if (type == DType::F32 || k % 8) {
        with_type(type, [&]<class T>() {
            launch_overlapped(plain_kernel<T>, dim3(blocks_for(n, 32), rows.experts), 256, 0, stream,
                              "grouped_dense", job);
        });
        return;
    }
    with_half_type(type, [&]<class T>() {
        // By the tokens that an expert has in the mean; any number of them is right with either.
        if (rows.rows > 16 * rows.experts)
            launch_tensor<T, 128>(job, rows.experts, stream);
        else
            launch_tensor<T, 16>(job, rows.experts, stream);
    });
}

}  // namespace turbomill::cuda
