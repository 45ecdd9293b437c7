// A w4 weight as a dense [N, K] matrix, for products of so many rows that a dense GEMM pays for it. One block
// to a tile of 64 x 64, one warp to a sub-tile.
#include "kernels/cuda/w4.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kStride = 72;  // of a row in shared memory: fragments and rows both meet few banks twice

template <class T>
__global__ void dequantize_kernel(W4View w, T* dense) {
    __shared__ uint4 staged[64 * kStride / 8];
    T* tile = reinterpret_cast<T*>(staged);  // [64, 72]
    const int sub = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int bk = blockIdx.x, bn = blockIdx.y;
    const uint4 codes =
        reinterpret_cast<const uint4*>(w.codes)[(int64_t(bn) * w.k_tiles + bk) * 128 + 32 * sub + lane];
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // a group has at least 32 columns
        const int group = (64 * bk + 32 * half) / w.group;
        const float2 scale = w4_params(w, w.scales, bn, group, sub, g);
        const CodeShift<T> shift(w4_zeros(w, bn, group, sub, g));
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
            unsigned a[4];
            shift(words[j], a);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 v = Pair<T>::unpack(reinterpret_cast<const typename Pair<T>::type&>(a[i]));
                const float s = i % 2 ? scale.y : scale.x;
                T* at = tile + (16 * sub + g + i % 2 * 8) * kStride + 16 * j + 2 * t + i / 2 * 8;
                *reinterpret_cast<unsigned*>(at) = pack_pair<T>(v.x * s, v.y * s);
            }
        }
    }
    __syncwarp();  // a warp writes out its own 16 rows
    const bool whole = w.k % 8 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * sub + 4 * i + lane / 8, n = 64 * bn + row, column = 64 * bk + lane % 8 * 8;
        const T* source = tile + row * kStride + lane % 8 * 8;
        T* target = dense + int64_t(n) * w.k + column;
        if (n >= w.n || column >= w.k) continue;
        if (whole) {
            *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
        } else {
            for (int c = 0; c < min(8, w.k - column); ++c) target[c] = source[c];
        }
    }
}

}  // namespace

void w4_dequantize(DType type, const W4View& w, void* dense, cudaStream_t stream) {
    const dim3 grid(w.k_tiles, blocks_for(w.n, 64));
    with_half_type(
        type, [&]<class T>() { dequantize_kernel<<<grid, 128, 0, stream>>>(w, static_cast<T*>(dense)); });
    check_launch("w4_dequantize");
}

}  // namespace turbomill::cuda
