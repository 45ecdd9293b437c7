// Norms of heads, rotary embedding and the cache write: a few threads for each token and head where a vector
// kernel fits, else one warp.
#include <type_traits>

#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 256;
constexpr int kPerLane = kMaxDim / 32;

__device__ void write_quantized(const CacheView& c, KvFormat format, const float* v, uint8_t* row,
                                __half2* params, uint8_t* codes, int lane) {
    const int d = c.head_dim;
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (lane + 32 * i < d) low = fminf(low, v[i]), high = fmaxf(high, v[i]);
    const Quantizer quantizer(warp_min(low), warp_max(high), format);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (lane + 32 * i < d) codes[lane + 32 * i] = uint8_t(quantizer.code(v[i]));
    __syncwarp();
    if (format == KvFormat::Int4) {
        for (int i = lane; i < d / 2; i += 32) row[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    } else {
        for (int i = lane; i < d; i += 32) row[i] = codes[i];
    }
    if (lane == 0) *params = quantizer.params;
}

__device__ void write_plain(const CacheView& c, const float* v, uint8_t* row, int lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + 32 * i;
        if (at >= c.head_dim) break;
        if (c.dtype == DType::F32) {
            reinterpret_cast<float*>(row)[at] = v[i];
        } else if (c.dtype == DType::F16) {
            reinterpret_cast<__half*>(row)[at] = __float2half_rn(v[i]);
        } else {
            reinterpret_cast<__nv_bfloat16*>(row)[at] = __float2bfloat16_rn(v[i]);
        }
    }
}

// The weights of the norm of a head, or null.
__device__ inline const float* head_norm(const RopeArgs& a, const CacheView& c, int head) {
    return head < a.num_heads ? a.q_norm : head < a.num_heads + c.heads ? a.k_norm : nullptr;
}

template <class T>
__global__ void rope_cache_kernel(RopeArgs a, CacheView c) {
    __shared__ float staged[kWarps][kMaxDim];
    __shared__ uint8_t codes[kWarps][kMaxDim];
    allow_next();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token = blockIdx.x, head = blockIdx.y * kWarps + warp, d = c.head_dim;
    const int heads = a.num_heads + 2 * c.heads;
    if (head >= heads) {
        wait_for_previous();
        return;  // whole warps leave; the rest only synchronise within a warp
    }
    T* row = static_cast<T*>(a.qkv) + (int64_t(token) * heads + head) * d;
    const int position = a.positions[token], slice = a.row_slice[token];
    const float *cos = a.cos + int64_t(position) * a.half, *sin = a.sin + int64_t(position) * a.half;
    const bool rotates = head < a.num_heads + c.heads;
    float cosine[kPerLane], sine[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + 32 * i;
        const bool rotated = rotates && at < 2 * a.half;
        cosine[i] = rotated ? cos[at < a.half ? at : at - a.half] : 1.f;
        sine[i] = rotated ? sin[at < a.half ? at : at - a.half] : 0.f;
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (lane + 32 * i < d) staged[warp][lane + 32 * i] = to_float(row[lane + 32 * i]);
    if (const float* norm = head_norm(a, c, head)) {
        float squares = 0.f;
        for (int i = lane; i < d; i += 32) squares += staged[warp][i] * staged[warp][i];
        const float scale = 1.f / sqrtf(warp_sum(squares) / float(d) + a.norm_eps);
        for (int i = lane; i < d; i += 32) staged[warp][i] *= scale * norm[i];
    }
    __syncwarp();
    float v[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + 32 * i;
        if (at >= d) break;
        v[i] = staged[warp][at];
        if (!rotates || at >= 2 * a.half) continue;
        const int j = at < a.half ? at : at - a.half;
        const float x = staged[warp][j], y = staged[warp][j + a.half];
        v[i] = at < a.half ? x * cosine[i] - y * sine[i] : y * cosine[i] + x * sine[i];
    }
    const int value = (head - a.num_heads) / c.heads, kv_head = (head - a.num_heads) % c.heads;
    if (c.rotated) {
        const bool centred = c.centre && head >= a.num_heads && value == 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int at = lane + 32 * i;
            if (at < d) staged[warp][at] = v[i] - (centred ? c.centre[kv_head * d + at] : 0.f);
        }
        hadamard_row(staged[warp], d, d & -d);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (lane + 32 * i < d) v[i] = staged[warp][lane + 32 * i];
    }
    if (head < a.num_heads) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (lane + 32 * i < d) row[lane + 32 * i] = from_float<T>(v[i]);
        return;
    }
    if (slice < 0) return;
    const int block = a.blocks[a.slices[slice].block_offset + position / c.block_len];
    const int place = position % c.block_len;
    uint8_t* target = cache_row(c, block, value, kv_head, place);
    if (c.policy) {
        write_quantized(c, value ? c.format[1] : c.format[0], v, target,
                        cache_params(c, block, value, kv_head, place), codes[warp], lane);
    } else {
        write_plain(c, v, target, lane);
    }
}

// Codes of a thread's elements, eight to each place.
template <KvFormat Format>
__device__ inline void write_codes(const Quantizer& quantizer, const float (&low)[8], const float (&high)[8],
                                   uint8_t* row, int lane, int lanes) {
    constexpr int kBits = kCodeBits<Format>;
    using Codes = std::conditional_t<kBits == 8, uint64_t, uint32_t>;
    Codes codes[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        codes[0] |= Codes(quantizer.code(low[i])) << (kBits * i);
        codes[1] |= Codes(quantizer.code(high[i])) << (kBits * i);
    }
    reinterpret_cast<Codes*>(row)[lane] = codes[0];
    reinterpret_cast<Codes*>(row)[lane + lanes] = codes[1];
}

// Sixteen elements of a head to a thread: eight of its first half, and the eight that they rotate with.
// Policy: of the cache; 0 for one in T. Norm: heads are normalised first.
template <class T, int D, int Policy, bool Norm>
__global__ void __launch_bounds__(kWarps * 32) rope_cache_16_kernel(RopeArgs a, CacheView c) {
    constexpr int kLanes = D / 16;  // of a head
    allow_next();
    const int heads = a.num_heads + 2 * c.heads, lane = threadIdx.x % kLanes;
    const int item = (int(blockIdx.x) * kWarps * 32 + int(threadIdx.x)) / kLanes;
    const bool inside = item < a.tokens * heads;
    const int token = inside ? item / heads : a.tokens - 1, head = inside ? item % heads : heads - 1;
    T* row = static_cast<T*>(a.qkv) + (int64_t(token) * heads + head) * D + 8 * lane;
    const int position = a.positions[token], slice = a.row_slice[token];
    const bool rotates = head < a.num_heads + c.heads;
    float cosine[8], sine[8], low[8], high[8];
    if (rotates) {
        load8(a.cos + int64_t(position) * (D / 2) + 8 * lane, cosine);
        load8(a.sin + int64_t(position) * (D / 2) + 8 * lane, sine);
    }
    wait_for_previous();
    load8(row, low);
    load8(row + D / 2, high);
    if constexpr (Norm) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += low[i] * low[i] + high[i] * high[i];
#pragma unroll
        for (int mask = kLanes / 2; mask; mask /= 2) squares += __shfl_xor_sync(kFullWarp, squares, mask);
        if (rotates) {
            const float* norm = head_norm(a, c, head) + 8 * lane;
            const float scale = 1.f / sqrtf(squares / float(D) + a.norm_eps);
            float weight[8];
            load8(norm, weight);
#pragma unroll
            for (int i = 0; i < 8; ++i) low[i] *= scale * weight[i];
            load8(norm + D / 2, weight);
#pragma unroll
            for (int i = 0; i < 8; ++i) high[i] *= scale * weight[i];
        }
    }
    if (rotates) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = low[i], y = high[i];
            low[i] = x * cosine[i] - y * sine[i];
            high[i] = y * cosine[i] + x * sine[i];
        }
    }
    if (c.rotated) {
        if (c.centre && rotates && head >= a.num_heads) {
            const float* centre = c.centre + (head - a.num_heads) * D + 8 * lane;
#pragma unroll
            for (int i = 0; i < 8; ++i) low[i] -= centre[i], high[i] -= centre[i + D / 2];
        }
        hadamard_lanes<8, kLanes>(low, kFullWarp);
        hadamard_lanes<8, kLanes>(high, kFullWarp);
        const float unit = 1.f / sqrtf(float(D));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = low[i], y = high[i];
            low[i] = (x + y) * unit;
            high[i] = (x - y) * unit;
        }
    }
    if (inside && head < a.num_heads) {
        store8(row, low);
        store8(row + D / 2, high);
    }
    const bool cached = inside && head >= a.num_heads && slice >= 0;
    const bool is_value = head >= a.num_heads + c.heads;
    uint8_t* target = nullptr;
    __half2* params = nullptr;
    if (cached) {
        const int value = (head - a.num_heads) / c.heads, kv_head = (head - a.num_heads) % c.heads;
        const int block = a.blocks[a.slices[slice].block_offset + position / c.block_len];
        const int place = position % c.block_len;
        target = cache_row(c, block, value, kv_head, place);
        params = cache_params(c, block, value, kv_head, place);
    }
    if constexpr (Policy == 0) {
        if (!cached) return;
        store8(reinterpret_cast<T*>(target) + 8 * lane, low);
        store8(reinterpret_cast<T*>(target) + 8 * lane + D / 2, high);
    } else {
        float least = low[0], most = low[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            least = fminf(least, fminf(low[i], high[i]));
            most = fmaxf(most, fmaxf(low[i], high[i]));
        }
#pragma unroll
        for (int mask = kLanes / 2; mask; mask /= 2) {
            least = fminf(least, __shfl_xor_sync(kFullWarp, least, mask));
            most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, mask));
        }
        constexpr KvFormat kKey = kKeyFormat<Policy>, kValue = kValueFormat<Policy>;
        const Quantizer quantizer(least, most, is_value ? kValue : kKey);
        if (!cached) return;
        if (is_value) {
            write_codes<kValue>(quantizer, low, high, target, lane, kLanes);
        } else {
            write_codes<kKey>(quantizer, low, high, target, lane, kLanes);
        }
        if (lane == 0) *params = quantizer.params;
    }
}

// Launches the vector kernel, or returns false.
template <class T>
bool rope_by_sixteen(const RopeArgs& args, const CacheView& cache, DType type, cudaStream_t stream) {
    const int dim = cache.head_dim;
    if (2 * args.half != dim || (!cache.quantized() && cache.dtype != type)) return false;
    const auto run = [&]<int D, int Policy>() {
        const int64_t threads = int64_t(args.tokens) * (args.num_heads + 2 * cache.heads) * (D / 16);
        launch_overlapped(args.q_norm ? rope_cache_16_kernel<T, D, Policy, true>
                                      : rope_cache_16_kernel<T, D, Policy, false>,
                          dim3(blocks_for(threads, kWarps * 32)), kWarps * 32, 0, stream, "rope_and_cache",
                          args, cache);
        return true;
    };
    const auto run_for = [&]<int D>() {
        return with_policy(cache.policy, [&]<int Policy>() { return run.template operator()<D, Policy>(); });
    };
    if (dim == 64) return run_for.template operator()<64>();
    if (dim == 128) return run_for.template operator()<128>();
    if (dim == 256) return run_for.template operator()<256>();
    return false;
}

// A block of threads for each KV head, one for each of its dimensions.
template <class T>
__global__ void add_keys_kernel(RopeArgs a, CacheView c, float* sums) {
    __shared__ float squares[32];
    const int d = c.head_dim, head = blockIdx.x, i = threadIdx.x, warp = i / 32,
              warps = (blockDim.x + 31) / 32;
    const int64_t width = int64_t(a.num_heads + 2 * c.heads) * d;
    const T* keys = static_cast<const T*>(a.qkv) + int64_t(a.num_heads + head) * d;
    float sum = 0.f;
    for (int token = 0; token < a.tokens; ++token) {
        float v = i < d ? to_float(keys[token * width + i]) : 0.f;
        if (a.k_norm) {
            const float part = warp_sum(v * v);
            __syncthreads();
            if (i % 32 == 0) squares[warp] = part;
            __syncthreads();
            float total = 0.f;
            for (int w = 0; w < warps; ++w) total += squares[w];
            if (i < d) v *= a.k_norm[i] / sqrtf(total / float(d) + a.norm_eps);
        }
        sum += v;
    }
    if (i < d) sums[head * d + i] += sum;
}

// Eight elements of a head to a thread, and a power of two of threads to a block of the rotation: all of D.
template <class T, int D>
__global__ void __launch_bounds__(kWarps * 32) rotate_outputs_8_kernel(T* out, int heads) {
    constexpr int kLanes = D / 8;
    allow_next();
    const int item = int(blockIdx.x) * kWarps * 32 + int(threadIdx.x);
    const bool inside = item / kLanes < heads;
    T* elements = out + 8 * int64_t(inside ? item : 0);
    float v[8];
    wait_for_previous();
    load8(elements, v);
    hadamard_lanes<8, kLanes>(v, kFullWarp);
    const float unit = 1.f / sqrtf(float(D));
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= unit;
    if (inside) store8(elements, v);
}

// A warp for each head of each row.
template <class T>
__global__ void __launch_bounds__(kWarps * 32) rotate_outputs_kernel(T* out, int heads, int d) {
    __shared__ float staged[kWarps][kMaxDim];
    allow_next();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = int(blockIdx.x) * kWarps + warp;
    wait_for_previous();
    if (head >= heads) return;
    T* row = out + int64_t(head) * d;
    for (int i = lane; i < d; i += 32) staged[warp][i] = to_float(row[i]);
    hadamard_row(staged[warp], d, d & -d);
    for (int i = lane; i < d; i += 32) row[i] = from_float<T>(staged[warp][i]);
}

}  // namespace

void add_keys(DType type, const RopeArgs& args, const CacheView& cache, float* sums, cudaStream_t stream) {
    with_type(type, [&]<class T>() {
        add_keys_kernel<T>
            <<<cache.heads, blocks_for(cache.head_dim, 32) * 32, 0, stream>>>(args, cache, sums);
    });
    check_launch("add_keys");
}

void rotate_outputs(DType type, void* out, int tokens, int num_heads, int head_dim, cudaStream_t stream) {
    if (tokens == 0) return;
    const int heads = tokens * num_heads;
    with_type(type, [&]<class T>() {
        const auto by_eight = [&]<int D>() {
            launch_overlapped(rotate_outputs_8_kernel<T, D>, dim3(blocks_for(heads, kWarps * 256 / D)),
                              kWarps * 32, 0, stream, "rotate_outputs", static_cast<T*>(out), heads);
        };
        if (head_dim == 64) return by_eight.template operator()<64>();
        if (head_dim == 128) return by_eight.template operator()<128>();
        if (head_dim == 256) return by_eight.template operator()<256>();
        launch_overlapped(rotate_outputs_kernel<T>, dim3(blocks_for(heads, kWarps)), kWarps * 32, 0, stream,
                          "rotate_outputs", static_cast<T*>(out), heads, head_dim);
    });
}

void rope_and_cache(DType type, const RopeArgs& args, const CacheView& cache, cudaStream_t stream) {
    if (args.tokens == 0) return;
    if (cache.head_dim > kMaxDim) throw std::invalid_argument("head_dim is larger than 256");
    bool done = false;
    if (type == DType::F16) done = rope_by_sixteen<__half>(args, cache, type, stream);
    if (type == DType::BF16) done = rope_by_sixteen<__nv_bfloat16>(args, cache, type, stream);
    if (done) return;
    const dim3 grid(args.tokens, blocks_for(args.num_heads + 2 * cache.heads, kWarps));
    with_type(type, [&]<class T>() {
        launch_overlapped(rope_cache_kernel<T>, grid, kWarps * 32, 0, stream, "rope_and_cache", args, cache);
    });
}

}  // namespace turbomill::cuda
