// Embedding, norms, gate and bias: one pass over their operands, fp32 arithmetic.
#include <algorithm>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kThreads = 256;

template <class From, class To>
__global__ void convert_kernel(const From* src, To* dst, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) dst[i] = from_float<To>(to_float(src[i]));
}

// Vector: H is a multiple of eight.
template <class T, bool Vector>
__global__ void embed_kernel(const T* table, const int* ids, const int* last_token, float scale, float* x,
                             int h) {
    allow_next();
    const int row = blockIdx.x, id = ids[row];
    const T* source = table + int64_t(id < 0 ? last_token[-1 - id] : id) * h;
    float* target = x + int64_t(row) * h;
    if constexpr (Vector) {
        for (int i = 8 * threadIdx.x; i < h; i += 8 * kThreads) {
            float v[8];
            load8(source + i, v);
#pragma unroll
            for (float& e : v) e *= scale;
            store8(target + i, v);
        }
    } else {
        for (int i = threadIdx.x; i < h; i += kThreads) target[i] = to_float(source[i]) * scale;
    }
}

__device__ inline float block_sum(float v) {
    __shared__ float sums[32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f);
}

// A row of any length.
template <class T>
__global__ void rms_norm_kernel(NormArgs a) {
    allow_next();
    const int64_t row = int64_t(a.rows ? a.rows[blockIdx.x] : blockIdx.x) * a.h;
    float* x = a.x ? a.x + row : nullptr;
    const T* delta = a.delta ? static_cast<const T*>(a.delta) + row : nullptr;
    T* y = static_cast<T*>(a.y) + int64_t(blockIdx.x) * a.h;
    wait_for_previous();
    float squares = 0.f;
    for (int i = threadIdx.x; i < a.h; i += kThreads) {
        const float v = (x ? x[i] : 0.f) + (delta ? to_float(delta[i]) : 0.f);
        if (a.keep && delta) x[i] = v;
        squares += v * v;
    }
    const float scale = 1.f / sqrtf(block_sum(squares) / float(a.h) + a.eps);
    for (int i = threadIdx.x; i < a.h; i += kThreads) {
        // Each thread reads back only what it wrote itself.
        const float v = (x ? x[i] : 0.f) + (delta && !a.keep ? to_float(delta[i]) : 0.f);
        y[i] = from_float<T>(v * scale * a.weight[i]);
    }
}

// A row whose threads hold eight elements each.
template <class T>
__global__ void rms_norm_8_kernel(NormArgs a) {
    allow_next();
    const int64_t row = int64_t(a.rows ? a.rows[blockIdx.x] : blockIdx.x) * a.h;
    const int at = 8 * threadIdx.x;
    const bool inside = at < a.h;
    float weight[8], v[8] = {};
    if (inside) load8(a.weight + at, weight);
    wait_for_previous();
    float squares = 0.f;
    if (inside) {
        if (a.x) load8(a.x + row + at, v);
        if (a.delta) {
            float delta[8];
            load8(static_cast<const T*>(a.delta) + row + at, delta);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += delta[i];
            if (a.keep) store8(a.x + row + at, v);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
    }
    const float scale = 1.f / sqrtf(block_sum(squares) / float(a.h) + a.eps);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= scale * weight[i];
    store8(static_cast<T*>(a.y) + int64_t(blockIdx.x) * a.h + at, v);
}

// One thread to a block of eight gates and the eight values that they pass.
template <class T, bool Gelu>
__global__ void gate_kernel(const T* gate_up, T* out, int64_t blocks) {
    allow_next();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    wait_for_previous();
    if (i >= blocks) return;
    float gate[8], up[8];
    load8(gate_up + 16 * i, gate);
    load8(gate_up + 16 * i + 8, up);
#pragma unroll
    for (int j = 0; j < 8; ++j) up[j] = Gelu ? gelu_gated<T>(gate[j], up[j]) : silu_gated<T>(gate[j], up[j]);
    store8(out + 8 * i, up);
}

__global__ void softcap_kernel(float* x, int64_t count, float cap) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count && isfinite(x[i])) x[i] = cap * tanhf(x[i] / cap);
}

template <class T>
__global__ void add_bias_kernel(T* y, const float* bias, int64_t total, int n) {
    allow_next();
    wait_for_previous();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < total) y[i] = from_float<T>(to_float(y[i]) + bias[i % n]);
}

template <bool Gelu>
void launch_gate(DType type, const void* gate_up, void* out, int rows, int inter, cudaStream_t stream) {
    const int64_t blocks = int64_t(rows) * (inter / 8);
    if (blocks == 0) return;
    with_type(type, [&]<class T>() {
        launch_overlapped(gate_kernel<T, Gelu>, dim3(blocks_for(blocks, kThreads)), kThreads, 0, stream,
                          "gate", static_cast<const T*>(gate_up), static_cast<T*>(out), blocks);
    });
}

}  // namespace

bool kernels_fit_device() {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, softcap_kernel) == cudaSuccess) return true;
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

void embed(DType type, const void* table, const int* ids, const int* last_token, float scale, float* x,
           int rows, int h, cudaStream_t stream) {
    if (rows == 0) return;
    with_type(type, [&]<class T>() {
        const auto kernel = h % 8 == 0 ? embed_kernel<T, true> : embed_kernel<T, false>;
        kernel<<<rows, kThreads, 0, stream>>>(static_cast<const T*>(table), ids, last_token, scale, x, h);
    });
    check_launch("embed");
}

void rms_norm(DType type, const NormArgs& args, cudaStream_t stream) {
    if (args.count == 0) return;
    const bool by_eight = args.h % 8 == 0 && args.h <= 8 * 1024;
    with_type(type, [&]<class T>() {
        launch_overlapped(by_eight ? rms_norm_8_kernel<T> : rms_norm_kernel<T>, dim3(args.count),
                          by_eight ? blocks_for(args.h / 8, 32) * 32 : kThreads, 0, stream, "rms_norm", args);
    });
}

void silu_gate(DType type, const void* gate_up, void* out, int rows, int inter, cudaStream_t stream) {
    launch_gate<false>(type, gate_up, out, rows, inter, stream);
}

void gelu_gate(DType type, const void* gate_up, void* out, int rows, int inter, cudaStream_t stream) {
    launch_gate<true>(type, gate_up, out, rows, inter, stream);
}

void softcap(float* x, int64_t count, float cap, cudaStream_t stream) {
    if (count == 0) return;
    softcap_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(x, count, cap);
    check_launch("softcap");
}

void add_bias(DType type, void* y, const float* bias, int rows, int n, cudaStream_t stream) {
    const int64_t total = int64_t(rows) * n;
    if (total == 0) return;
    with_type(type, [&]<class T>() {
        launch_overlapped(add_bias_kernel<T>, dim3(blocks_for(total, kThreads)), kThreads, 0, stream,
                          "add_bias", static_cast<T*>(y), bias, total, n);
    });
}

}  // namespace turbomill::cuda
