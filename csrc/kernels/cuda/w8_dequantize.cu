// W8 weights as numbers: dense rows of a matrix, for products of so many rows that a dense GEMM pays for it,
// and single rows of an embedding.
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/w8.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kStride = 72;  // of a row in shared memory: fragments and rows both meet few banks twice
constexpr int kThreads = 256;

__device__ inline float2 params_at(const W8View& w, const void* base, int tile, int group, int sub, int g) {
    const int64_t at = (int64_t(tile) * w.groups + group) * 32 + 8 * sub + g;
    return w8_pair(__ldg(static_cast<const unsigned*>(base) + at), w.bf16_params);
}

// One block to a tile of 64 x 64, one warp to a sub-tile. `first`: the tile of N that becomes the matrix's
// first.
template <class T>
__global__ void __launch_bounds__(128) dequantize_kernel(W8View w, int first, int end, T* dense) {
    __shared__ uint4 staged[64 * kStride / 8];
    T* tile = reinterpret_cast<T*>(staged);  // [64, 72]
    const int sub = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int bk = blockIdx.x, bn = first + blockIdx.y;
    const uint8_t* codes = w.codes + (int64_t(bn) * w.k_tiles + bk) * 4096 + 1024 * sub + 128 * g + 16 * t;
    const uint4 rows[2] = {*reinterpret_cast<const uint4*>(codes),
                           *reinterpret_cast<const uint4*>(codes + 64)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // a group has at least 32 columns
        const int group = (64 * bk + 32 * half) / w.group;
        const float2 scale = params_at(w, w.scales, bn, group, sub, g);
        const float2 zero = w.zeros ? params_at(w, w.zeros, bn, group, sub, g) : make_float2(128.f, 128.f);
        const float2 min = w.mins ? params_at(w, w.mins, bn, group, sub, g) : make_float2(0.f, 0.f);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float s = h ? scale.y : scale.x,
                        z = w.mins ? 0.f
                            : h    ? zero.y
                                   : zero.x,
                        m = h ? min.y : min.x;
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) {
                const uint4& row = rows[h];
                const unsigned word = j == 0 ? row.x : j == 1 ? row.y : j == 2 ? row.z : row.w;
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    T* at = tile + (16 * sub + 8 * h + g) * kStride + 16 * j + 8 * u + 2 * t;
                    *reinterpret_cast<unsigned*>(at) =
                        pack_pair<T>((w8_code(word, u) - z) * s + m, (w8_code(word, 2 + u) - z) * s + m);
                }
            }
        }
    }
    __syncwarp();  // a warp writes out its own 16 rows
    const bool whole = w.k % 8 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * sub + 4 * i + lane / 8, n = 64 * bn + row, column = 64 * bk + lane % 8 * 8;
        const T* source = tile + row * kStride + lane % 8 * 8;
        T* target = dense + int64_t(n - 64 * first) * w.k + column;
        if (n >= end || column >= w.k) continue;
        if (whole) {
            *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
        } else {
            for (int c = 0; c < min(8, w.k - column); ++c) target[c] = source[c];
        }
    }
}

// One block to a token, one thread to 16 of its codes at a time.
__global__ void embed_kernel(W8View w, const int* ids, const int* last_token, float factor, float* x) {
    allow_next();
    const int id = ids[blockIdx.x], token = id < 0 ? last_token[-1 - id] : id;
    const int tile = token / 64, row = token % 64, sub = row / 16, g = row % 8;
    const bool lower = row % 16 >= 8;
    const uint8_t* codes = w.codes + int64_t(tile) * w.k_tiles * 4096 + w8_row(row);
    float* target = x + int64_t(blockIdx.x) * w.k;
    for (int i = threadIdx.x; i < w.k_tiles * 4; i += kThreads) {
        const int bk = i / 4, t = i % 4;
        const uint4 word = *reinterpret_cast<const uint4*>(codes + int64_t(bk) * 4096 + 16 * t);
        const unsigned words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (64 * bk + 32 * half >= w.k) break;  // there may be no such group
            const int group = (64 * bk + 32 * half) / w.group;
            const auto of_row = [&](const void* base) {
                const float2 pair = params_at(w, base, tile, group, sub, g);
                return lower ? pair.y : pair.x;
            };
            const float scale = of_row(w.scales), min = w.mins ? of_row(w.mins) : 0.f,
                        zero = w.mins    ? 0.f
                               : w.zeros ? of_row(w.zeros)
                                         : 128.f;
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) {
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    const int column = 64 * bk + 16 * j + 8 * u + 2 * t;
                    if (column >= w.k) continue;  // K is even
                    const auto value = [&](int byte) {
                        return ((w8_code(words[j], byte) - zero) * scale + min) * factor;
                    };
                    *reinterpret_cast<float2*>(target + column) = make_float2(value(u), value(2 + u));
                }
            }
        }
    }
}

}  // namespace

void w8_dequantize(DType type, const W8View& w, int first, int rows, void* dense, cudaStream_t stream) {
    if (rows == 0) return;
    const dim3 grid(w.k_tiles, blocks_for(rows, 64));
    with_half_type(type, [&]<class T>() {
        dequantize_kernel<<<grid, 128, 0, stream>>>(w, first / 64, first + rows, static_cast<T*>(dense));
    });
    check_launch("w8_dequantize");
}

void embed_w8(const W8View& w, const int* ids, const int* last_token, float factor, float* x, int rows,
              cudaStream_t stream) {
    if (rows == 0) return;
    embed_kernel<<<rows, kThreads, 0, stream>>>(w, ids, last_token, factor, x);
    check_launch("embed_w8");
}

}  // namespace turbomill::cuda
