// A KV head's query rows as the tensor cores' B operand.
#pragma once

#include "kernels/cuda/decode_tile.cuh"
#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/scores.cuh"

namespace turbomill::cuda {

// The query rows of a pair, as the B operand: tile n, column g is row 8 n + g.
template <class T, int Policy, int D, int Columns, bool Rope>
struct Queries {
    unsigned fragment[Columns][D / 16][2];
    // Of this lane's columns 8 n + 2 t + i: what turns raw scores into powers of two, and the factor of
    // zeros.
    float factor[Columns][2], sum[Columns][2];

    // The first of two steps, between which a warp may wait for other loads.
    __device__ void request(const T* qkv, int64_t width, int first_row, int head, int group, int rows) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < Columns; ++n) {
            const int row = 8 * n + g;
            const bool inside = row < rows;
            const T* q = qkv + int64_t(first_row + row / group) * width + (head * group + row % group) * D;
            if constexpr (Policy == 0) {
#pragma unroll
                for (int s = 0; s < D / 16; ++s)
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair)
                        fragment[n][s][pair] =
                            inside ? *reinterpret_cast<const unsigned*>(q + 16 * s + 8 * pair + 2 * t) : 0u;
            } else {
#pragma unroll
                for (int i = 0; i < D / 32; ++i)
                    words_[n][i] =
                        inside ? reinterpret_cast<const uint4*>(q + t * (D / 4))[i] : make_uint4(0, 0, 0, 0);
            }
        }
    }

    // cos, sin [D / 2]: of the token's position, with Rope; then `rotated` says whether the cache's rows are.
    __device__ void finish(float score_scale, const float* cos, const float* sin, bool rotated) {
        const float scale = kLog2E * score_scale;
#pragma unroll
        for (int n = 0; n < Columns; ++n) {
            if constexpr (Policy == 0) {
                if constexpr (Rope) rotate_fragments(cos, sin, n);
                factor[n][0] = factor[n][1] = scale;
            } else {
                finish_scaled(scale, cos, sin, rotated, n);
            }
        }
    }

  private:
    using Format = DecodeFormat<kKeyFormat<Policy>, D>;

    uint4 words_[Policy ? Columns : 1][D / 32];  // of codes: the lane's D / 4 elements of each row

    // Dimensions D / 2 apart are D / 32 steps apart, in the same lane.
    __device__ void rotate_fragments(const float* cos, const float* sin, int n) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int s = 0; s < D / 32; ++s)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                unsigned &low = fragment[n][s][pair], &high = fragment[n][s + D / 32][pair];
                const float2 c = *reinterpret_cast<const float2*>(cos + 16 * s + 8 * pair + 2 * t),
                             f = *reinterpret_cast<const float2*>(sin + 16 * s + 8 * pair + 2 * t),
                             x = Pair<T>::unpack(reinterpret_cast<const typename Pair<T>::type&>(low)),
                             y = Pair<T>::unpack(reinterpret_cast<const typename Pair<T>::type&>(high));
                low = pack_pair<T>(x.x * c.x - y.x * f.x, x.y * c.y - y.y * f.y);
                high = pack_pair<T>(y.x * c.x + x.x * f.x, y.y * c.y + x.y * f.y);
            }
    }

    // Queries become float16 whatever T is: each row is scaled by a power of two that puts its greatest
    // element near 2^8, far from both ends of the type.
    __device__ void finish_scaled(float scale, const float* cos, const float* sin, bool rotated, int n) {
        float v[D / 4];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            const unsigned w[4] = {words_[n][i].x, words_[n][i].y, words_[n][i].z, words_[n][i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 both = Pair<T>::unpack(reinterpret_cast<const typename Pair<T>::type&>(w[j]));
                v[8 * i + 2 * j] = both.x;
                v[8 * i + 2 * j + 1] = both.y;
            }
        }
        if constexpr (Rope) {  // dimensions D / 2 apart are two lanes apart
            const int t = threadIdx.x % 4, first = t % 2 * (D / 4);
#pragma unroll
            for (int i = 0; i < D / 4; ++i) {
                const float other = __shfl_xor_sync(kFullWarp, v[i], 2), c = cos[first + i],
                            f = sin[first + i];
                v[i] = t < 2 ? v[i] * c - other * f : v[i] * c + other * f;
            }
            if (kRotatesInside<Policy, D> && rotated) {
                hadamard_lanes<D / 4, 4>(v, kFullWarp);
                const float unit = 1.f / sqrtf(float(D));
#pragma unroll
                for (int i = 0; i < D / 4; ++i) v[i] *= unit;
            }
#pragma unroll
            for (int i = 0; i < D / 4; ++i) v[i] = to_float(from_float<T>(v[i]));
        }
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < D / 4; ++i) most = fmaxf(most, fabsf(v[i]));
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
        const int exponent = (__float_as_int(most) >> 23) - 127;
        const float up = exponent < -100 ? 1.f : __int_as_float((127 + 8 - exponent) << 23);
        float total = 0.f;
#pragma unroll
        for (int s = 0; s < D / 16; ++s)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const float f = Format::query_factor(pair);
                const __half2 both = __floats2half2_rn(v[Format::query_index(s, pair, 0)] * up * f,
                                                       v[Format::query_index(s, pair, 1)] * up * f);
                fragment[n][s][pair] = reinterpret_cast<const unsigned&>(both);
                const float2 rounded = __half22float2(both);
                total += (rounded.x + rounded.y) / f;
            }
        total += __shfl_xor_sync(kFullWarp, total, 1);
        total += __shfl_xor_sync(kFullWarp, total, 2);
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int owner = 4 * (2 * t + i);
            sum[n][i] = __shfl_sync(kFullWarp, total, owner) / Format::kUnit;
            factor[n][i] = scale * Format::kUnit / __shfl_sync(kFullWarp, up, owner);
        }
    }
};

}  // namespace turbomill::cuda
