// Attention of slices of few query rows (decodes) over the paged cache, bound by the bytes of the cache.
//
// The keys of all slices and KV heads, in units of 64, form one line that is cut into equal ranges, one for
// each block of a grid that fills the GPU once: uneven sequences share it evenly, and the grid does not
// depend on the batch. A range covers parts of one or several (head, slice) pairs. The blocks of a pair that
// was cut leave partial results in the workspace; the last to arrive merges them, in order.
//
// Within a block each warp streams keys and values of its own through a ring in shared memory, several tiles
// ahead, with no barrier between warps. Scores are computed transposed, S^T = K Q^T, and outputs too,
// O^T = V^T P^T: cached rows fill the 16 rows of the tensor cores' tile, a KV head's query rows its 8
// columns. With codes c, scales s and zeros z, q (s c + z) = s (q c) + z sum(q) and p (s c + z) = (p s) c + p
// z: nothing is done to single elements of the cache (decode_tile.cuh).
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/decode_fresh.cuh"
#include "kernels/cuda/decode_tile.cuh"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kWarps = 4;
// 2^v; below the normal range it is 0.
__device__ inline float power_of_two(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

template <int Bits, int D, int Keys>
constexpr int kTileBytes = Keys * DecodeFormat<Bits, D>::kRow;
template <int Bits, int D, int Keys>
constexpr int kStageBytes = 2 * kTileBytes<Bits, D, Keys> + (Bits < 16 ? 2 * Keys * 4 : 0);
template <int D>
constexpr int kPart = 16 * D + 32;  // floats of a partial result: 16 rows, their tops, their sums
template <int Bits, int D, int Columns, int Keys, int Stages>
constexpr int kDecodeShared = std::max({kWarps * Stages * kStageBytes<Bits, D, Keys>,  // the rings,
                                        kWarps * 8 * Columns * (D + 4) * 4,            // warps that merge,
                                        (kMostDecodeParts + 2) * 32 * 4});             // parts that merge

__device__ inline int log2_of(int power) {
    return 31 - __clz(power);
}

// A warp's tiles: keys [begin, end) in pieces of Keys, every kWarps-th one.
template <int Bits, int D, int Keys, int Stages>
class KeyStream {
  public:
    __device__ KeyStream(const CacheView& c, int layer, int head, const int* blocks, int begin, int end,
                         int all, uint8_t* ring)
        : c_(c),
          keys_(c.data + layer * c.layer_bytes + head * int64_t(c.head_bytes)),
          params_(c.data + layer * c.layer_bytes + 2 * c.heads * int64_t(c.head_bytes) +
                  head * int64_t(c.param_bytes)),
          blocks_(blocks),
          shift_(log2_of(c.block_len)),
          end_(end),
          all_(all),
          next_(begin + threadIdx.x / 32 * Keys),
          read_(next_),
          ring_(ring) {
#pragma unroll
        for (int i = 0; i < Stages; ++i) {
            const int key = next_ + i * kWarps * Keys;
            first_blocks_[i] = key < end_ ? blocks_[key >> shift_] : 0;
        }
    }

    // Whether there is a tile to ask for, and its end.
    __device__ bool wants() const { return next_ < end_; }
    __device__ int wanted_end() const { return next_ + Keys; }

    // Asks for tile i < Stages - 1, the first of all, whose blocks were looked up together.
    __device__ void request_first(int i) {
        block_ = first_blocks_[i];
        request();
        block_ = first_blocks_[i + 1];
    }

    // Asks for the next tile, if there is one; a group of copies either way.
    __device__ void request_next() {
        request();
        if (next_ < end_) block_ = blocks_[next_ >> shift_];  // in time for the next call
    }

    // Waits for the oldest tile that was not taken yet. The warp is done with the tile before it.
    __device__ uint8_t* take() {
        wait_copies<Stages - 2>();
        __syncwarp();
        uint8_t* stage = ring_ + take_ * kStageBytes<Bits, D, Keys>;
        take_ = take_ + 1 == Stages ? 0 : take_ + 1;
        return stage;
    }

    // The first key of the tile to take, or false when all were taken.
    __device__ bool next_tile(int& key) {
        if (read_ >= end_) return false;
        key = read_;
        read_ += kWarps * Keys;
        return true;
    }

    // Whether token `key`, the last of all, is in one of this warp's tiles.
    __device__ bool owns(int key) const {
        const int first = read_;
        return key < end_ && key >= first && (key - first) / Keys % kWarps == 0;
    }

    // Rotates and caches the new token `key`, whose key is at `row` of qkv and whose value heads * D further.
    template <class T>
    __device__ void store_fresh(const T* row, int key, const float* cos, const float* sin,
                                FreshRows<Bits, D>& fresh) const {
        const int64_t block = blocks_[key >> shift_] * c_.block_bytes;
        const int place = key & (c_.block_len - 1);
        uint8_t* cached = const_cast<uint8_t*>(keys_) + block + place * DecodeFormat<Bits, D>::kRow;
        __half2* params = reinterpret_cast<__half2*>(const_cast<uint8_t*>(params_) + block) + place;
        WarpRow<D> k, v;
        load_row<T, D>(row, k);
        load_row<T, D>(row + c_.heads * D, v);
        rotate_row<D>(cos, sin, k);
        fresh.template store<T>(0, k, cached, params);
        fresh.template store<T>(1, v, cached + c_.heads * int64_t(c_.head_bytes),
                                params + c_.heads * int64_t(c_.param_bytes) / 4);
        __syncwarp();
    }

  private:
    __device__ void request() {
        if (next_ < end_) {
            const int lane = threadIdx.x % 32, place = next_ & (c_.block_len - 1);
            const int64_t block = block_ * c_.block_bytes;
            const int valid = all_ - next_;
            uint8_t* stage = ring_ + write_ * kStageBytes<Bits, D, Keys>;
            const uint8_t* rows = keys_ + block + place * DecodeFormat<Bits, D>::kRow;
            request_rows<Bits, D, Keys>(stage, rows, valid, lane);
            request_rows<Bits, D, Keys>(stage + kTileBytes<Bits, D, Keys>,
                                        rows + c_.heads * int64_t(c_.head_bytes), valid, lane);
            if constexpr (Bits < 16) {
                if (lane < Keys / 2) {
                    const int value = lane / (Keys / 4), chunk = lane % (Keys / 4);
                    copy_async(
                        stage + 2 * kTileBytes<Bits, D, Keys> + 16 * lane,
                        params_ + block + value * int64_t(c_.heads) * c_.param_bytes + 4 * place + 16 * chunk,
                        16);
                }
            }
            next_ += kWarps * Keys;
        }
        commit_copies();
        write_ = write_ + 1 == Stages ? 0 : write_ + 1;
    }

    const CacheView& c_;
    const uint8_t *keys_, *params_;
    const int* blocks_;
    const int shift_, end_, all_;
    int next_, read_, block_ = 0, write_ = 0, take_ = 0;
    int first_blocks_[Stages];
    uint8_t* ring_;
};

// The query rows of a pair, as the B operand: tile n, column g is row 8 n + g.
template <class T, int Bits, int D, int Columns, bool Rope>
struct Queries {
    unsigned fragment[Columns][D / 16][2];
    // Of this lane's columns 8 n + 2 t + i: what turns raw scores into powers of two, and the factor of
    // zeros.
    float factor[Columns][2], sum[Columns][2];

    // cos, sin [D / 2]: of the token's position, with Rope.
    __device__ void load(const T* qkv, int64_t width, int first_row, int head, int group, int rows,
                         const float* cos, const float* sin) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        constexpr float kBase2 = 1.4426950408889634f;
        const float scale = kBase2 / sqrtf(float(D));
#pragma unroll
        for (int n = 0; n < Columns; ++n) {
            const int row = 8 * n + g;
            const bool inside = row < rows;
            const T* q = qkv + int64_t(first_row + row / group) * width + (head * group + row % group) * D;
            if constexpr (Bits == 16) {
#pragma unroll
                for (int s = 0; s < D / 16; ++s)
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair)
                        fragment[n][s][pair] =
                            inside ? *reinterpret_cast<const unsigned*>(q + 16 * s + 8 * pair + 2 * t) : 0u;
                if constexpr (Rope) rotate_fragments(cos, sin, n);
                factor[n][0] = factor[n][1] = scale;
            } else {
                load_scaled(q + t * (D / 4), inside, scale, cos, sin, n);
            }
        }
    }

  private:
    using Format = DecodeFormat<Bits, D>;

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
    __device__ void load_scaled(const T* q, bool inside, float scale, const float* cos, const float* sin,
                                int n) {
        float v[D / 4];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            const uint4 words = inside ? reinterpret_cast<const uint4*>(q)[i] : make_uint4(0, 0, 0, 0);
            const unsigned w[4] = {words.x, words.y, words.z, words.w};
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
                v[i] = to_float(from_float<T>(t < 2 ? v[i] * c - other * f : v[i] * c + other * f));
            }
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
            sum[n][i] = __shfl_sync(kFullWarp, total, owner) / kCodeUnit;
            factor[n][i] = scale * kCodeUnit / __shfl_sync(kFullWarp, up, owner);
        }
    }
};

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

// One tile of keys [key, key + Keys). limit: keys that each column sees; `fewest` the least of them, `most`
// the greatest: what is stored beyond has no meaning.
template <class T, int Bits, int D, int Columns, bool Rope, int Keys>
__device__ void attend(const uint8_t* stage, int key, const int (&limit)[Columns][2], int fewest, int most,
                       const Queries<T, Bits, D, Columns, Rope>& q, Running<D, Columns>& r) {
    using Element = std::conditional_t<Bits == 16, T, __half>;
    constexpr int kTiles = Keys / 16;
    const int lane = threadIdx.x % 32, g = lane / 4;
    const uint8_t* values = stage + kTileBytes<Bits, D, Keys>;
    float x[kTiles][Columns][4] = {};  // row g or g + 8 of keys, columns 2t, 2t + 1
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
        key_fragments<Bits, D>(stage, 16 * m, lane, [&](int s, const unsigned (&a)[4]) {
#pragma unroll
            for (int n = 0; n < Columns; ++n)
                mma<Element>(x[m][n], a, q.fragment[n][s][0], q.fragment[n][s][1]);
        });
    float2 value_params[kTiles][2];
    if constexpr (Bits < 16) {
        const __half2* params = reinterpret_cast<const __half2*>(stage + 2 * kTileBytes<Bits, D, Keys>);
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
                        score = score * p.x + p.y * q.sum[n][i];
                    }
            }
    }
    if (key + Keys > fewest) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = key + 16 * m + 8 * half + g;
                if (Bits < 16 && at >= most) value_params[m][half] = make_float2(0.f, 0.f);
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
    if constexpr (Bits < 16) {
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
                    if constexpr (Bits < 16) {
                        r.zero[n][i] += weight[i] * value_params[m][half].y;
                        weight[i] *= value_params[m][half].x * r.inverse_unit;
                    }
                }
                p[n][half] = transposed(pack_pair<Element>(weight[0], weight[1]));
            }
        value_fragments<Bits, D>(values, 16 * m, lane, [&](int o, const unsigned (&a)[4]) {
#pragma unroll
            for (int n = 0; n < Columns; ++n) mma<Element>(r.out[o][n], a, p[n][0], p[n][1]);
        });
    }
}

// Where a (head, slice) pair's result goes.
template <class T, int D>
struct Output {
    T* out;  // [T, Nq, D]
    int num_heads, first_row, head, group;

    __device__ void write(int row, int column, float4 v) const {
        T* at =
            out + (int64_t(first_row + row / group) * num_heads + head * group + row % group) * D + column;
        at[0] = from_float<T>(v.x), at[1] = from_float<T>(v.y);
        at[2] = from_float<T>(v.z), at[3] = from_float<T>(v.w);
    }
};

__device__ inline float4 scaled(const float4& v, float by) {
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ inline void add_scaled(float4& sum, float weight, const float4& v) {
    sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
}

// The merge of a pair's `parts` partial results: part 0 in slot `first`, the others in every second slot from
// `rest` on. `scratch`: parts * 32 floats of shared memory.
template <class T, int D>
__device__ void merge_parts(const float* data, int first, int rest, int parts, int rows, float* scratch,
                            const Output<T, D>& output) {
    constexpr int kAtOnce = 4;  // parts that a thread has under way
    const auto part = [&](int p) { return data + int64_t(p == 0 ? first : rest + 2 * (p - 1)) * kPart<D>; };
    if (parts <= kAtOnce) {  // everything in one go
        for (int i = threadIdx.x; i < rows * D / 4; i += kWarps * 32) {
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
    for (int i = threadIdx.x; i < parts * 16; i += kWarps * 32) {
        tops[i] = __ldcg(part(i / 16) + 16 * D + i % 16);
        sums[i] = __ldcg(part(i / 16) + 16 * D + 16 + i % 16);
    }
    __syncthreads();
    for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
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
    for (int i = threadIdx.x; i < rows * D / 4; i += kWarps * 32) {
        const int row = i / (D / 4);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
        for (int p = 0; p < parts; ++p)
            add_scaled(sum, tops[p * 16 + row], __ldcg(reinterpret_cast<const float4*>(part(p)) + i));
        output.write(row, i % (D / 4) * 4, sum);
    }
}

template <class T, int Bits, int D, int Columns, bool Rope, int Keys, int Stages, int Blocks>
__global__ void __launch_bounds__(kWarps * 32, Blocks)
    decode_kernel(DecodeArgs a, AttentionParts workspace, CacheView c, int layer) {
    using Format = DecodeFormat<Bits, D>;
    constexpr int kRows = 8 * Columns, kStride = D + 4;  // of an output row while warps merge
    extern __shared__ uint4 shared[];
    __shared__ float tops[kWarps][16], sums[kWarps][16];
    __shared__ bool last;
    __shared__ std::conditional_t<Rope, FreshRows<Bits, D>, char> fresh;
    allow_next();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint8_t* ring = reinterpret_cast<uint8_t*>(shared) + warp * Stages * kStageBytes<Bits, D, Keys>;
    const int group = a.num_heads / c.heads;
    const int64_t width = int64_t(a.num_heads + 2 * c.heads) * D;

    const DecodeRange range = a.ranges[blockIdx.x];
    if (range.begin >= range.end) {
        wait_for_previous();  // whoever waits for this kernel relies on those before it
        return;
    }
    DecodeEntry e = range.first;
    int head = range.head, entry = range.entry, pair_begin = range.pair_begin, pair_end = range.pair_end;
    bool waited = false;
    for (int at = range.begin; at < range.end;) {
        const int until = min(range.end, pair_end);
        const int all = e.context + e.length, rows = e.length * group;
        KeyStream<Bits, D, Keys, Stages> stream(c, layer, head, a.blocks + e.block_offset,
                                                (at - pair_begin) * kDecodeUnit,
                                                min(all, (until - pair_begin) * kDecodeUnit), all, ring);
#pragma unroll
        for (int i = 0; i < Stages - 1; ++i) {
            // What earlier steps cached may be read before the kernels ahead of this one are done.
            if (!Rope && !waited && stream.wants() && stream.wanted_end() > e.context) {
                wait_for_previous();
                waited = true;
            }
            stream.request_first(i);
        }
        if (!waited) wait_for_previous();
        waited = true;
        const float* cos = Rope ? a.cos + int64_t(e.context) * (D / 2) : nullptr;
        const float* sin = Rope ? a.sin + int64_t(e.context) * (D / 2) : nullptr;
        if constexpr (Rope) {
            if (stream.owns(e.context))
                stream.template store_fresh<T>(
                    static_cast<const T*>(a.qkv) + e.first_row * width + (a.num_heads + head) * D, e.context,
                    cos, sin, fresh);
        }
        Queries<T, Bits, D, Columns, Rope> queries;
        queries.load(static_cast<const T*>(a.qkv), width, e.first_row, head, group, rows, cos, sin);
        int limit[Columns][2];
#pragma unroll
        for (int n = 0; n < Columns; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                limit[n][i] = e.context + min(8 * n + 2 * t + i, rows - 1) / group + 1;
        Running<D, Columns> r;
        for (int key; stream.next_tile(key);) {
            uint8_t* stage = stream.take();
            stream.request_next();
            if constexpr (Rope)
                if (e.context < key + Keys) fresh.template patch<Keys>(stage, e.context - key);
            attend<T, Bits, D, Columns, Rope, Keys>(stage, key, limit, e.context + 1, all, queries, r);
        }

        // The warps of the block meet.
        wait_copies<0>();
        __syncthreads();
        float* merged = reinterpret_cast<float*>(shared);  // [kWarps, kRows, D + 4], over the rings
#pragma unroll
        for (int n = 0; n < Columns; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 8 * n + 2 * t + i;
                const float sum = sum_of_rows(r.sum[n][i]), zero = sum_of_rows(r.zero[n][i]);
                const float unit = Bits < 16 ? r.unit : 1.f;
                if (g == 0) {
                    tops[warp][row] = r.top[n][i] * queries.factor[n][i];
                    sums[warp][row] = sum;
                }
#pragma unroll
                for (int o = 0; o < Format::kOutputs; ++o)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        merged[(warp * kRows + row) * kStride + Format::output_dim(o, g, half)] =
                            r.out[o][n][2 * half + i] * (Format::output_factor(half) * unit) + zero;
            }
        __syncthreads();
        const Output<T, D> output{static_cast<T*>(a.out), a.num_heads, e.first_row, head, group};
        const bool whole = at == pair_begin && until == pair_end;
        const int first_block = pair_begin / range.share;
        const int parts = (pair_end - 1) / range.share - first_block + 1;
        const int slot = 2 * blockIdx.x + (at == pair_begin ? 1 : 0);
        float* part = workspace.data + int64_t(slot) * kPart<D>;
        for (int i = threadIdx.x; i < rows * D / 4; i += kWarps * 32) {
            const int row = i / (D / 4), column = i % (D / 4) * 4;
            float top = -INFINITY, sum = 0.f;
            float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w][row]);
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float weight = tops[w][row] == -INFINITY ? 0.f : power_of_two(tops[w][row] - top);
                sum += sums[w][row] * weight;
                add_scaled(out, weight,
                           *reinterpret_cast<const float4*>(merged + (w * kRows + row) * kStride + column));
            }
            if (whole) {
                output.write(row, column, scaled(out, 1.f / sum));
                continue;
            }
            reinterpret_cast<float4*>(part)[i] = out;
            if (column == 0) part[16 * D + row] = top, part[16 * D + 16 + row] = sum;
        }
        if (!whole) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                last = atomicAdd(workspace.counters + first_block, 1u) == unsigned(parts - 1);
            __syncthreads();
            if (last) {
                __threadfence();
                merge_parts<T, D>(workspace.data, 2 * first_block + 1, 2 * (first_block + 1), parts, rows,
                                  reinterpret_cast<float*>(shared), output);
                if (threadIdx.x == 0) workspace.counters[first_block] = 0;
            }
        }
        __syncthreads();  // the rings are free again
        at = until;
        if (at >= range.end) return;
        pair_begin = at;
        do {  // slices without keys are padding
            if (++entry == a.count) entry = 0, ++head;
            e = a.entries[entry];
            pair_end = pair_begin + a.entries[entry + 1].first_unit - e.first_unit;
        } while (pair_end == pair_begin);
    }
}

template <class T, int Bits, int D, int Columns, bool Rope, int Keys, int Stages>
void launch_decode(const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache, int layer,
                   cudaStream_t stream) {
    constexpr int kBlocks = decode_blocks(Bits, 8 * Columns);
    constexpr auto kernel = decode_kernel<T, Bits, D, Columns, Rope, Keys, Stages, kBlocks>;
    constexpr int kShared = kDecodeShared<Bits, D, Columns, Keys, Stages>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "attention_decode's shared memory");
    launch_overlapped(kernel, dim3(args.range_count), kWarps * 32, kShared, stream, "attention_decode", args,
                      parts, cache, layer);
}

template <class T, int Bits, int D, int Keys, int Stages>
void launch_decode_variant(const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache,
                           int layer, cudaStream_t stream) {
    const auto run = [&]<int Columns, bool Rope>() {
        launch_decode<T, Bits, D, Columns, Rope, Keys, Stages>(args, parts, cache, layer, stream);
    };
    if (args.most_rows <= 8)
        args.cos ? run.template operator()<1, true>() : run.template operator()<1, false>();
    else
        args.cos ? run.template operator()<2, true>() : run.template operator()<2, false>();
}

}  // namespace

// Once in each file that includes this, for the cache format of that file. Keys: of a tile; Stages: tiles of
// a warp's ring; Blocks: on a multiprocessor.
template <int Bits, int Keys, int Stages>
void attention_decode_for(DType type, const DecodeArgs& args, const AttentionParts& parts,
                          const CacheView& cache, int layer, cudaStream_t stream) {
    with_half_type(type, [&]<class T>() {
        if (cache.head_dim == 64)
            launch_decode_variant<T, Bits, 64, Keys, Stages>(args, parts, cache, layer, stream);
        else
            launch_decode_variant<T, Bits, 128, Keys, Stages>(args, parts, cache, layer, stream);
    });
}

}  // namespace turbomill::cuda
