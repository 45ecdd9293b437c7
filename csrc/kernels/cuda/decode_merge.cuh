// Where partial results of attention_decode meet.
#pragma once

#include "kernels/cuda/decode_softmax.cuh"

namespace turbomill::cuda {

template <int D>
constexpr int kDecodePart = 16 * D + 32;  // floats of a partial result: 16 rows, their tops, their sums

__device__ inline float4 scaled(const float4& v, float by) {
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ inline void add_scaled(float4& sum, float weight, const float4& v) {
    sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
}

// Where a (head, slice) pair's result goes.
template <class T, int D>
struct DecodeOutput {
    T* out;  // [T, Nq, D]
    int num_heads, first_row, head, group;
    bool rotated;

    // By the D / 4 threads of a row together.
    __device__ void write(int row, int column, float4 v) const {
        if (rotated) rotate(v);
        T* at =
            out + (int64_t(first_row + row / group) * num_heads + head * group + row % group) * D + column;
        at[0] = from_float<T>(v.x), at[1] = from_float<T>(v.y);
        at[2] = from_float<T>(v.z), at[3] = from_float<T>(v.w);
    }

  private:
    // Back from the rotation of values.
    static __device__ void rotate(float4& v) {
        if constexpr (D <= 128) {
            const unsigned mask = D == 128 ? kFullWarp : 0xffffu << (threadIdx.x & 16);
            float x[4] = {v.x, v.y, v.z, v.w};
            hadamard_lanes<4, D / 4>(x, mask);
            v = scaled(make_float4(x[0], x[1], x[2], x[3]), 1.f / sqrtf(float(D)));
        }
    }
};

// What the warps of a block leave in shared memory for each other: outputs relative to the top of their own
// keys, that top in powers of two, and the sum of their weights.
template <int D, int Rows>
struct WarpResults {
    static constexpr int kStride = D + 4;  // of an output row
    static constexpr int kBytes = kDecodeWarps * Rows * kStride * 4;

    float* outputs;  // [kDecodeWarps, Rows, kStride]
    float (*tops)[16];
    float (*sums)[16];

    template <int Policy, class T, int Columns, bool Rope>
    __device__ void put(const Running<D, Columns>& r,
                        const Queries<T, Policy, D, Columns, Rope>& queries) const {
        using Format = DecodeFormat<kValueFormat<Policy>, D>;
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < Columns; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 8 * n + 2 * t + i;
                const float sum = sum_of_rows(r.sum[n][i]), zero = sum_of_rows(r.zero[n][i]);
                const float unit = Policy != 0 ? r.unit : 1.f;
                if (g == 0) {
                    tops[warp][row] = r.top[n][i] * queries.factor[n][i];
                    sums[warp][row] = sum;
                }
#pragma unroll
                for (int o = 0; o < Format::kOutputs; ++o)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        outputs[(warp * Rows + row) * kStride + Format::output_dim(o, g, half)] =
                            r.out[o][n][2 * half + i] * (Format::output_factor(half) * unit) + zero;
            }
    }

    // Their merge, to where the pair's result goes, or, undivided, to its place as a part.
    template <class T>
    __device__ void merge(int rows, float* part, const DecodeOutput<T, D>& output) const {
        for (int i = threadIdx.x; i < rows * D / 4; i += kDecodeWarps * 32) {
            const int row = i / (D / 4), column = i % (D / 4) * 4;
            float top = -INFINITY, sum = 0.f;
            float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, tops[w][row]);
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) {
                const float weight = tops[w][row] == -INFINITY ? 0.f : power_of_two(tops[w][row] - top);
                sum += sums[w][row] * weight;
                add_scaled(out, weight,
                           *reinterpret_cast<const float4*>(outputs + (w * Rows + row) * kStride + column));
            }
            if (!part) {
                output.write(row, column, scaled(out, 1.f / sum));
                continue;
            }
            reinterpret_cast<float4*>(part)[i] = out;
            if (column == 0) part[16 * D + row] = top, part[16 * D + 16 + row] = sum;
        }
    }
};

// The merge of a pair's `parts` partial results: part 0 in slot `first`, the others in every second slot from
// `rest` on. `scratch`: parts * 32 floats of shared memory.
template <class T, int D>
__device__ inline void merge_parts(const float* data, int first, int rest, int parts, int rows,
                                   float* scratch, const DecodeOutput<T, D>& output) {
    constexpr int kAtOnce = 4;  // parts that a thread has under way
    const auto part = [&](int p) {
        return data + int64_t(p == 0 ? first : rest + 2 * (p - 1)) * kDecodePart<D>;
    };
    if (parts <= kAtOnce) {  // everything in one go
        for (int i = threadIdx.x; i < rows * D / 4; i += kDecodeWarps * 32) {
            const int row = i / (D / 4);
            float4 out[kAtOnce];
            float top[kAtOnce], sum[kAtOnce], greatest = -INFINITY, total = 0.f;
#pragma unroll
            for (int p = 0; p < kAtOnce; ++p) {
                const float* source = part(min(p, parts - 1));
                out[p] = __ldcg(reinterpret_cast<const float4*>(source) + i);
                top[p] = __ldcg(source + 16 * D + row);
                sum[p] = __ldcg(source + 16 * D + 16 + row);
            }
#pragma unroll
            for (int p = 0; p < kAtOnce; ++p) greatest = fmaxf(greatest, top[p]);
            float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int p = 0; p < kAtOnce; ++p) {
                const float weight = p < parts ? power_of_two(top[p] - greatest) : 0.f;
                total += sum[p] * weight;
                add_scaled(all, weight, out[p]);
            }
            output.write(row, i % (D / 4) * 4, scaled(all, 1.f / total));
        }
        return;
    }
    float *tops = scratch, *sums = scratch + parts * 16;
    for (int i = threadIdx.x; i < parts * 16; i += kDecodeWarps * 32) {
        tops[i] = __ldcg(part(i / 16) + 16 * D + i % 16);
        sums[i] = __ldcg(part(i / 16) + 16 * D + 16 + i % 16);
    }
    __syncthreads();
    for (int row = threadIdx.x / 32; row < rows; row += kDecodeWarps) {
        const int lane = threadIdx.x % 32;
        float top = -INFINITY, sum = 0.f;
        for (int p = lane; p < parts; p += 32) top = fmaxf(top, tops[p * 16 + row]);
        top = warp_max(top);
        for (int p = lane; p < parts; p += 32)
            sum += sums[p * 16 + row] * power_of_two(tops[p * 16 + row] - top);
        sum = warp_sum(sum);
        for (int p = lane; p < parts; p += 32)
            tops[p * 16 + row] = power_of_two(tops[p * 16 + row] - top) / sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * D / 4; i += kDecodeWarps * 32) {
        const int row = i / (D / 4);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
        for (int p = 0; p < parts; ++p)
            add_scaled(sum, tops[p * 16 + row], __ldcg(reinterpret_cast<const float4*>(part(p)) + i));
        output.write(row, i % (D / 4) * 4, sum);
    }
}

}  // namespace turbomill::cuda
