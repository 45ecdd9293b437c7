// The arithmetic of attention_decode: an online softmax over a warp's tiles, on the tensor cores.
#pragma once

#include <type_traits>

#include "kernels/cuda/decode_query.cuh"
#include "kernels/cuda/decode_stream.cuh"

namespace turbomill::cuda {

// What a warp knows of its keys: the online softmax of the lane's columns, and the outputs. `sum` and `zero`
// (the part of the values' zeros) are of this lane's keys only. Weights are in units of `unit`, a power of
// two no smaller than any scale of the values so far, so that they fit float16.
template <int D, int Columns>
struct Running {
    float out[D / 16][Columns][4] = {};
    float top[Columns][2], sum[Columns][2] = {}, zero[Columns][2] = {};
    float unit = 0.f, inverse_unit = 0.f;

    __device__ Running() {
#pragma unroll
        for (int n = 0; n < Columns; ++n) top[n][0] = top[n][1] = -INFINITY;
    }

    __device__ void shrink_outputs(const float (&by)[Columns][2]) {
#pragma unroll
        for (int o = 0; o < D / 16; ++o)
#pragma unroll
            for (int n = 0; n < Columns; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[o][n][i] *= by[n][i % 2];
    }
};

__device__ inline float greatest_of_rows(float v) {  // over the lanes of one column
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, 4));
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, 8));
    return fmaxf(v, __shfl_xor_sync(kFullWarp, v, 16));
}
__device__ inline float sum_of_rows(float v) {
    v += __shfl_xor_sync(kFullWarp, v, 4);
    v += __shfl_xor_sync(kFullWarp, v, 8);
    return v + __shfl_xor_sync(kFullWarp, v, 16);
}

// Capped scores x, which stay in the units of q.factor.
template <int Tiles, class T, int Policy, int D, int Columns, bool Rope>
__device__ inline void cap_scores(float softcap, const Queries<T, Policy, D, Columns, Rope>& q,
                                  float (&x)[Tiles][Columns][4]) {
#pragma unroll
    for (int n = 0; n < Columns; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const SoftCap cap(q.factor[n][i] / kLog2E, softcap);
#pragma unroll
            for (int m = 0; m < Tiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) x[m][n][2 * half + i] = cap(x[m][n][2 * half + i]);
        }
}

// One tile of keys [key, key + Keys). Each column sees the keys of the window that ends before its limit;
// `fewest` is the least limit, `most` the greatest: what is stored beyond has no meaning. Plain: without
// window and cap.
template <bool Plain, class T, int Policy, int D, int Columns, bool Rope, int Keys>
__device__ inline void attend(const uint8_t* stage, int key, const int (&limit)[Columns][2], int fewest,
                              int most, const Scores& scores, const Queries<T, Policy, D, Columns, Rope>& q,
                              Running<D, Columns>& r) {
    using Element = std::conditional_t<Policy == 0, T, __half>;
    constexpr int kTiles = Keys / 16;
    const int lane = threadIdx.x % 32, g = lane / 4;
    constexpr KvFormat kKey = kKeyFormat<Policy>, kValue = kValueFormat<Policy>;
    const uint8_t* values = stage + kTileBytes<kKey, D, Keys>;
    float x[kTiles][Columns][4] = {};  // row g or g + 8 of keys, columns 2t, 2t + 1
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
        key_fragments<kKey, D>(stage, 16 * m, lane, [&](int s, const unsigned (&a)[4]) {
#pragma unroll
            for (int n = 0; n < Columns; ++n)
                mma<Element>(x[m][n], a, q.fragment[n][s][0], q.fragment[n][s][1]);
        });
    float2 value_params[kTiles][2];
    if constexpr (Policy != 0) {
        const __half2* params = reinterpret_cast<const __half2*>(stage + kParamsAt<Policy, D, Keys>);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * m + 8 * half + g;
                const float2 p = __half22float2(params[row]);
                value_params[m][half] = __half22float2(params[Keys + row]);
#pragma unroll
                for (int n = 0; n < Columns; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& score = x[m][n][2 * half + i];
                        score *= p.x;
                        if constexpr (DecodeFormat<kKey, D>::kHasZeros) score += p.y * q.sum[n][i];
                    }
            }
    }
    if (!Plain && scores.softcap > 0.f) cap_scores<kTiles>(scores.softcap, q, x);
    if (!Plain && key < most - scores.window) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < Columns; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (key + 16 * m + i / 2 * 8 + g < limit[n][i % 2] - scores.window)
                        x[m][n][i] = -INFINITY;
    }
    if (key + Keys > fewest) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = key + 16 * m + 8 * half + g;
                if (Policy != 0 && at >= most) value_params[m][half] = make_float2(0.f, 0.f);
#pragma unroll
                for (int n = 0; n < Columns; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (at >= limit[n][i]) x[m][n][2 * half + i] = -INFINITY;
            }
    }

    float base[Columns][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < Columns; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = x[0][n][i];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) top = fmaxf(top, fmaxf(x[m][n][i], x[m][n][2 + i]));
            base[n][i] = fmaxf(r.top[n][i], greatest_of_rows(top));
            grows |= base[n][i] > r.top[n][i];
        }
    if (__any_sync(kFullWarp, grows)) {
        float shrink[Columns][2];
#pragma unroll
        for (int n = 0; n < Columns; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float old = r.top[n][i];
                shrink[n][i] = old == -INFINITY ? 0.f : power_of_two((old - base[n][i]) * q.factor[n][i]);
                r.top[n][i] = base[n][i];
                r.sum[n][i] *= shrink[n][i];
                r.zero[n][i] *= shrink[n][i];
            }
        r.shrink_outputs(shrink);
    }
    if constexpr (Policy != 0) {
        float scale = 0.f;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
            scale = fmaxf(scale, fmaxf(value_params[m][0].x, value_params[m][1].x));
        if (__any_sync(kFullWarp, scale > r.unit)) {
            scale = greatest_of_rows(scale);  // the lanes of a quad have the same keys
            const float unit = __int_as_float(((__float_as_int(scale) >> 23) + 1) << 23), by = r.unit / unit;
            float shrink[Columns][2];
#pragma unroll
            for (int n = 0; n < Columns; ++n) shrink[n][0] = shrink[n][1] = by;
            r.shrink_outputs(shrink);
            r.unit = unit;
            r.inverse_unit = 1.f / unit;
        }
    }

    float shift[Columns][2];
#pragma unroll
    for (int n = 0; n < Columns; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)  // no key seen yet: all weights are 0
            shift[n][i] = base[n][i] == -INFINITY ? 0.f : base[n][i] * q.factor[n][i];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        unsigned p[Columns][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < Columns; ++n) {
                float weight[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    weight[i] = power_of_two(x[m][n][2 * half + i] * q.factor[n][i] - shift[n][i]);
                    r.sum[n][i] += weight[i];
                    if constexpr (Policy != 0) {
                        if constexpr (DecodeFormat<kValue, D>::kHasZeros)
                            r.zero[n][i] += weight[i] * value_params[m][half].y;
                        weight[i] *= value_params[m][half].x * r.inverse_unit;
                    }
                }
                p[n][half] = transposed(pack_pair<Element>(weight[0], weight[1]));
            }
        value_fragments<kValue, D>(values, 16 * m, lane, [&](int o, const unsigned (&a)[4]) {
#pragma unroll
            for (int n = 0; n < Columns; ++n) mma<Element>(r.out[o][n], a, p[n][0], p[n][1]);
        });
    }
}

}  // namespace turbomill::cuda
