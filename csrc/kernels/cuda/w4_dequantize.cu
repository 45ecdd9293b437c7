// A w4 weight as a dense [N, K] matrix, for products of so many rows that a dense GEMM pays for it. One block
// to a tile of 64 x 64, one warp to a sub-tile.
#include "kernels/cuda/w4.cuh"

namespace turbomill::cuda {
namespace {

template <class T>
__global__ void dequantize_kernel(W4View w, T* dense) {
    const int sub = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int bk = blockIdx.x, bn = blockIdx.y;
    const uint4 codes =
        reinterpret_cast<const uint4*>(w.codes)[(int64_t(bn) * w.k_tiles + bk) * 128 + 32 * sub + lane];
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    const int row = 64 * bn + 16 * sub + g;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int k = 64 * bk + 16 * j, group = k / w.group;
        const float2 scale = w4_params(w, w.scales, bn, group, sub, g);
        const CodeShift<T> shift(w4_zeros(w, bn, group, sub, g));
        unsigned a[4];
        shift(words[j], a);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = row + i % 2 * 8, column = k + 2 * t + i / 2 * 8;
            if (n >= w.n || column >= w.k) continue;
            const float2 v = Pair<T>::unpack(reinterpret_cast<const typename Pair<T>::type&>(a[i]));
            const float s = i % 2 ? scale.y : scale.x;
            *reinterpret_cast<unsigned*>(dense + int64_t(n) * w.k + column) = pack_pair<T>(v.x * s, v.y * s);
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
