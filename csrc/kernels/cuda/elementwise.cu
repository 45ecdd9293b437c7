// Embedding, norms, gate and bias: one pass over their operands, fp32 arithmetic.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kThreads = 256;

template <class From, class To>
__global__ void convert_kernel(const From* src, To* dst, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) dst[i] = from_float<To>(to_float(src[i]));
}

template <class T>
__global__ void embed_kernel(const T* table, const int* ids, const int* last_token, float* x, int h) {
    const int row = blockIdx.x, id = ids[row];
    const T* source = table + int64_t(id < 0 ? last_token[-1 - id] : id) * h;
    for (int i = threadIdx.x; i < h; i += kThreads) x[int64_t(row) * h + i] = to_float(source[i]);
}

template <class T>
__global__ void rms_norm_kernel(NormArgs a) {
    __shared__ float sums[kThreads / 32];
    const int64_t row = int64_t(a.rows ? a.rows[blockIdx.x] : blockIdx.x) * a.h;
    float* x = a.x + row;
    const T* delta = a.delta ? static_cast<const T*>(a.delta) + row : nullptr;
    T* y = static_cast<T*>(a.y) + int64_t(blockIdx.x) * a.h;
    float squares = 0.f;
    for (int i = threadIdx.x; i < a.h; i += kThreads) {
        const float v = delta ? x[i] + to_float(delta[i]) : x[i];
        if (a.keep && delta) x[i] = v;
        squares += v * v;
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < kThreads / 32; ++i) total += sums[i];
    const float scale = 1.f / sqrtf(total / float(a.h) + a.eps);
    for (int i = threadIdx.x; i < a.h; i += kThreads) {
        // Each thread reads back only what it wrote itself.
        const float v = delta && !a.keep ? x[i] + to_float(delta[i]) : x[i];
        y[i] = from_float<T>(v * scale * a.weight[i]);
    }
}

template <class T>
__global__ void silu_gate_kernel(const T* gate_up, T* out, int64_t n, int inter) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) return;
    const int64_t row = i / inter;
    const int column = int(i % inter);
    const T* gate = gate_up + row * 2 * inter + column / 8 * 16 + column % 8;
    const float g = to_float(gate[0]), up = to_float(gate[8]);
    out[i] = from_float<T>(g / (1.f + expf(-g)) * up);
}

template <class T>
__global__ void add_bias_kernel(T* y, const float* bias, int64_t total, int n) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < total) y[i] = from_float<T>(to_float(y[i]) + bias[i % n]);
}

}  // namespace

bool kernels_fit_device() {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, silu_gate_kernel<float>) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

void convert(DType from, const void* src, DType to, void* dst, int64_t n, cudaStream_t stream) {
    if (n == 0) return;
    with_type(from, [&]<class From>() {
        with_type(to, [&]<class To>() {
            convert_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream>>>(static_cast<const From*>(src),
                                                                             static_cast<To*>(dst), n);
        });
    });
    check_launch("convert");
}

void embed(DType type, const void* table, const int* ids, const int* last_token, float* x, int rows, int h,
           cudaStream_t stream) {
    if (rows == 0) return;
    with_type(type, [&]<class T>() {
        embed_kernel<<<rows, kThreads, 0, stream>>>(static_cast<const T*>(table), ids, last_token, x, h);
    });
    check_launch("embed");
}

void rms_norm(DType type, const NormArgs& args, cudaStream_t stream) {
    if (args.count == 0) return;
    with_type(type, [&]<class T>() { rms_norm_kernel<T><<<args.count, kThreads, 0, stream>>>(args); });
    check_launch("rms_norm");
}

void silu_gate(DType type, const void* gate_up, void* out, int rows, int inter, cudaStream_t stream) {
    const int64_t n = int64_t(rows) * inter;
    if (n == 0) return;
    with_type(type, [&]<class T>() {
        silu_gate_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream>>>(static_cast<const T*>(gate_up),
                                                                           static_cast<T*>(out), n, inter);
    });
    check_launch("silu_gate");
}

void add_bias(DType type, void* y, const float* bias, int rows, int n, cudaStream_t stream) {
    const int64_t total = int64_t(rows) * n;
    if (total == 0) return;
    with_type(type, [&]<class T>() {
        add_bias_kernel<<<blocks_for(total, kThreads), kThreads, 0, stream>>>(static_cast<T*>(y), bias, total,
                                                                              n);
    });
    check_launch("add_bias");
}

}  // namespace turbomill::cuda
