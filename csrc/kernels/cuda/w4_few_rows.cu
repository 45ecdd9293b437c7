// W4A16 for few rows: bound by the bytes of the weight, which stream once from memory to the tensor cores'
// registers. Weights are the A operand (16 rows of N), tokens the B operand (8 columns). The fragments hold
// code - zero, which is exact; a group's products are summed in fp32 and scaled then, so no weight is
// rounded.
//
// A block owns 64 rows of N, here of one weight or of an expert's, and a range of K; its warps take K tiles
// of 64 in turn and meet in shared memory. When N alone does not fill the GPU, K is split over blocks too:
// each writes its partial sums, and the last to arrive adds them in order, so that results do not depend on
// timing.
#include <algorithm>

#include "kernels/cuda/moe_launch.h"
#include "kernels/cuda/w4.cuh"

namespace turbomill::cuda {
namespace {

struct Job {
    W4View w;
    const void* x;  // [rows, K]
    const float* bias;
    void* y;  // [rows, N]
    bool out_fp32;
    int rows, tiles_per_split;
    float* partial;  // [splits, rows, N/64 * 64]
    unsigned* counters;
};

struct Codes {
    uint4 sub[4];  // a lane's 16 bytes of each sub-tile
};

__device__ inline Codes load_codes(const W4View& w, int bn, int bk, int lane) {
    const uint4* tile = reinterpret_cast<const uint4*>(w.codes) + (int64_t(bn) * w.k_tiles + bk) * 128 + lane;
    Codes codes;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        uint4& v = codes.sub[s];
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
            : "l"(tile + 32 * s));
    }
    return codes;
}

// One tile of 64 columns of x as B fragments: straight from memory, or, when several tiles of tokens share
// it, by way of shared memory, which asynchronous copies fill one tile ahead. Each warp has two buffers of
// its own.
template <class T, int Tokens>
struct Activations {
    static constexpr int kStride = 72;                      // of a row in shared memory
    static constexpr int kElements = 8 * Tokens * kStride;  // of a buffer
    const T* x;
    int rows, k, lane;
    T* buffers;  // null: straight from memory

    __device__ void request(int bk, int buffer) const {
        if (!buffers) return;
#pragma unroll
        for (int i = 0; i < 2 * Tokens; ++i) {
            const int row = 4 * i + lane / 8, column = 64 * bk + lane % 8 * 8;
            const bool inside = row < rows && column < k;
            copy_async(buffers + buffer * kElements + row * kStride + lane % 8 * 8,
                       inside ? x + int64_t(row) * k + column : x, inside ? 16 : 0);
        }
        commit_copies();
    }

    __device__ void load(int bk, int buffer, unsigned (&b)[Tokens][4][2]) const {
        if (!buffers) {
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int m = 0; m < Tokens; ++m) {
                const int row = 8 * m + g;
                const T* source = x + int64_t(row) * k + 64 * bk + 2 * t;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const bool inside = row < rows && 64 * bk + 8 * i + 2 * t < k;
                    b[m][i / 2][i % 2] = inside ? *reinterpret_cast<const unsigned*>(source + 8 * i) : 0u;
                }
            }
            return;
        }
#pragma unroll
        for (int m = 0; m < Tokens; ++m) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                unsigned r[4];
                load_matrices(
                    r, buffers + buffer * kElements + (8 * m + lane % 8) * kStride + 16 * j + lane / 8 * 8);
                b[m][j][0] = r[0], b[m][j][1] = r[1], b[m][j + 1][0] = r[2], b[m][j + 1][1] = r[3];
            }
        }
    }
};

// Tokens: tiles of 8 rows of x. Group32: two groups to a tile of K; otherwise a tile lies in one group.
// Staged: x by way of shared memory.
template <class T, int Tokens, int Warps, bool Group32, bool Staged>
__device__ inline void few_rows(const Job& job, int bn, int split, int splits) {
    constexpr int kColumns = 8 * Tokens, kStride = 68;  // 68: a fragment's stores meet no bank twice
    using Input = Activations<T, Tokens>;
    constexpr size_t kSumBytes = sizeof(float) * Warps * kColumns * kStride;
    constexpr size_t kInputBytes = Staged ? sizeof(T) * Warps * 2 * Input::kElements : 0;
    __shared__ uint4 shared[(kSumBytes > kInputBytes ? kSumBytes : kInputBytes) / 16];
    auto sums = reinterpret_cast<float (*)[kColumns * kStride]>(shared);  // once x is no longer needed
    __shared__ bool last;
    const W4View& w = job.w;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int end = min(w.k_tiles, (split + 1) * job.tiles_per_split);
    const Input input{static_cast<const T*>(job.x), job.rows, w.k, lane,
                      Staged ? reinterpret_cast<T*>(shared) + warp * 2 * Input::kElements : nullptr};

    float acc[4][Tokens][4] = {};
    // Blocks start at different places of K, so that they do not all ask for the same piece of x at once.
    const int begin = split * job.tiles_per_split, count = end - begin, start = bn * 5 * Warps % count;
    const auto tile_of = [&](int i) { return begin + (i + start < count ? i + start : i + start - count); };
    Codes next;
    if (warp < count) {
        next = load_codes(w, bn, tile_of(warp), lane);
        input.request(tile_of(warp), 0);
    }
    for (int i = warp, buffer = 0; i < count; i += Warps, buffer ^= 1) {
        const int bk = tile_of(i);
        const Codes codes = next;
        if constexpr (Staged) __syncwarp();  // every lane is done with the other buffer
        if (i + Warps < count) {
            next = load_codes(w, bn, tile_of(i + Warps), lane);
            input.request(tile_of(i + Warps), buffer ^ 1);
            if constexpr (Staged) wait_copies<1>();
        } else if constexpr (Staged) {
            wait_copies<0>();
        }
        if constexpr (Staged) __syncwarp();
        unsigned b[Tokens][4][2];
        input.load(bk, buffer, b);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const unsigned words[4] = {codes.sub[s].x, codes.sub[s].y, codes.sub[s].z, codes.sub[s].w};
#pragma unroll
            for (int half = 0; half < (Group32 ? 2 : 1); ++half) {
                const int group = Group32 ? 2 * bk + half : 64 * bk / w.group;
                const float2 scale = w4_params(w, w.scales, bn, group, s, g);
                const CodeShift<T> shift(w4_zeros(w, bn, group, s, g));
                float part[Tokens][4] = {};
#pragma unroll
                for (int j = Group32 ? 2 * half : 0; j < (Group32 ? 2 * half + 2 : 4); ++j) {
                    unsigned a[4];
                    shift(words[j], a);
#pragma unroll
                    for (int m = 0; m < Tokens; ++m) mma<T>(part[m], a, b[m][j][0], b[m][j][1]);
                }
#pragma unroll
                for (int m = 0; m < Tokens; ++m) {
                    acc[s][m][0] += part[m][0] * scale.x;
                    acc[s][m][1] += part[m][1] * scale.x;
                    acc[s][m][2] += part[m][2] * scale.y;
                    acc[s][m][3] += part[m][3] * scale.y;
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int m = 0; m < Tokens; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[warp][(8 * m + 2 * t + i % 2) * kStride + 16 * s + g + i / 2 * 8] = acc[s][m][i];
    __syncthreads();

    const int padded = gridDim.x * 64;
    const auto finish = [&](int token, int row, float value) {
        const int n = 64 * bn + row;
        if (n >= w.n) return;
        if (job.bias) value += job.bias[n];
        const int64_t at = int64_t(token) * w.n + n;
        if (job.out_fp32) {
            static_cast<float*>(job.y)[at] = value;
        } else {
            static_cast<T*>(job.y)[at] = from_float<T>(value);
        }
    };
    for (int i = threadIdx.x; i < job.rows * 64; i += Warps * 32) {
        const int token = i / 64, row = i % 64;
        float value = 0.f;
#pragma unroll
        for (int v = 0; v < Warps; ++v) value += sums[v][token * kStride + row];
        if (splits == 1) {
            finish(token, row, value);
        } else {
            job.partial[(int64_t(split) * job.rows + token) * padded + 64 * bn + row] = value;
        }
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(job.counters + bn, 1u) == unsigned(splits - 1);
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < job.rows * 64; i += Warps * 32) {
        const int token = i / 64, row = i % 64;
        float value = 0.f;
        for (int part = 0; part < splits; ++part)
            value += __ldcg(job.partial + (int64_t(part) * job.rows + token) * padded + 64 * bn + row);
        finish(token, row, value);
    }
    if (threadIdx.x == 0) job.counters[bn] = 0;
}

template <class T, int Tokens, int Warps, bool Group32, bool Staged>
__global__ void __launch_bounds__(Warps * 32) few_rows_kernel(Job job) {
    few_rows<T, Tokens, Warps, Group32, Staged>(job, blockIdx.x, blockIdx.y, gridDim.y);
}

// Of an expert (blockIdx.y), whose rows offsets[e] up to offsets[e + 1] are taken 8 * Tokens at a time.
template <class T, int Tokens, int Warps, bool Group32, bool Staged>
__global__ void __launch_bounds__(Warps * 32) expert_rows_kernel(Job job, const int* offsets) {
    const int expert = blockIdx.y, end = offsets[expert + 1];
    const int64_t tiles = int64_t(gridDim.x) * expert, params = tiles * job.w.groups * 128;
    Job part = job;
    part.w.codes += tiles * job.w.k_tiles * 2048;
    part.w.scales = static_cast<const uint8_t*>(job.w.scales) + params;
    if (job.w.zeros) part.w.zeros = static_cast<const uint8_t*>(job.w.zeros) + params;
    for (int first = offsets[expert]; first < end; first += 8 * Tokens) {
        part.x = static_cast<const T*>(job.x) + int64_t(first) * job.w.k;
        part.y = static_cast<T*>(job.y) + int64_t(first) * job.w.n;
        part.rows = min(8 * Tokens, end - first);
        few_rows<T, Tokens, Warps, Group32, Staged>(part, blockIdx.x, 0, 1);
        __syncthreads();  // shared memory is free again
    }
}

template <class T, int Tokens, int Warps>
void launch(Job job, const W4Workspace& workspace, cudaStream_t stream) {
    const int tiles = blocks_for(job.w.n, 64);
    int splits = std::clamp(2 * workspace.multiprocessors / tiles, 1, std::max(1, job.w.k_tiles / Warps));
    splits = int(std::min<size_t>(splits, workspace.partial_floats / (size_t(job.rows) * tiles * 64)));
    if (splits < 1 || tiles > workspace.counter_count) splits = 1;
    job.tiles_per_split = blocks_for(job.w.k_tiles, splits);
    splits = blocks_for(job.w.k_tiles, job.tiles_per_split);
    const dim3 grid(tiles, splits);
    const auto run = [&]<bool Group32>() {
        if (Tokens > 1 && job.w.k % 8 == 0) {  // rows of x are aligned for the copies
            few_rows_kernel<T, Tokens, Warps, Group32, (Tokens > 1)><<<grid, Warps * 32, 0, stream>>>(job);
        } else {
            few_rows_kernel<T, Tokens, Warps, Group32, false><<<grid, Warps * 32, 0, stream>>>(job);
        }
    };
    job.w.group == 32 ? run.template operator()<true>() : run.template operator()<false>();
}

template <class T, int Tokens, int Warps>
void launch_experts(Job job, const ExpertRows& rows, cudaStream_t stream) {
    job.tiles_per_split = job.w.k_tiles;
    const dim3 grid(blocks_for(job.w.n, 64), rows.experts);
    const auto run = [&]<bool Group32>() {
        if (Tokens > 1 && job.w.k % 8 == 0) {
            expert_rows_kernel<T, Tokens, Warps, Group32, (Tokens > 1)>
                <<<grid, Warps * 32, 0, stream>>>(job, rows.offsets);
        } else {
            expert_rows_kernel<T, Tokens, Warps, Group32, false>
                <<<grid, Warps * 32, 0, stream>>>(job, rows.offsets);
        }
    };
    job.w.group == 32 ? run.template operator()<true>() : run.template operator()<false>();
}

}  // namespace

void w4_few_rows(DType type, DType out, const W4View& w, const void* x, const float* bias, void* y, int rows,
                 const W4Workspace& workspace, cudaStream_t stream) {
    if (rows == 0) return;
    if (rows > kFewRows) throw std::invalid_argument("w4_few_rows: too many rows");
    const Job job{w, x, bias, y, out == DType::F32, rows, 0, workspace.partial, workspace.counters};
    with_half_type(type, [&]<class T>() {
        if (rows <= 8) {
            launch<T, 1, 8>(job, workspace, stream);
        } else if (rows <= 16) {
            launch<T, 2, 8>(job, workspace, stream);
        } else {
            launch<T, 4, 4>(job, workspace, stream);
        }
    });
    check_launch("w4_few_rows");
}

void grouped_w4(DType type, const W4View& w, const void* x, void* y, const ExpertRows& rows,
                cudaStream_t stream) {
    if (rows.rows == 0) return;
    const Job job{w, x, nullptr, y, false, 0, 0, nullptr, nullptr};
    with_half_type(type, [&]<class T>() {
        // By the rows that an expert has in the mean.
        if (rows.rows <= 8 * rows.experts)
            launch_experts<T, 1, 8>(job, rows, stream);
        else
            launch_experts<T, 4, 4>(job, rows, stream);
    });
    check_launch("grouped_w4");
}

}  // namespace turbomill::cuda
