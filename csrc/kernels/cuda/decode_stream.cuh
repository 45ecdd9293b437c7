// A warp's way through the cached keys and values of a slice: tiles asked for ahead of their use, through a
// ring in shared memory.
#pragma once

#include "kernels/cuda/decode_fresh.cuh"
#include "kernels/cuda/decode_tile.cuh"

namespace turbomill::cuda {

constexpr int kDecodeWarps = 4;  // of a block

template <KvFormat F, int D, int Keys>
constexpr int kTileBytes = Keys * DecodeFormat<F, D>::kRow;
// Keys, values and, for codes, the parameters of both, which lie at kParamsAt.
template <int Policy, int D, int Keys>
constexpr int kParamsAt = kTileBytes<kKeyFormat<Policy>, D, Keys> + kTileBytes<kValueFormat<Policy>, D, Keys>;
template <int Policy, int D, int Keys>
constexpr int kStageBytes = kParamsAt<Policy, D, Keys> + (Policy ? 2 * Keys * 4 : 0);

__device__ inline int log2_of(int power) {
    return 31 - __clz(power);
}

// A warp's tiles: keys [begin, end) in pieces of Keys, every kDecodeWarps-th one.
template <int Policy, int D, int Keys, int Stages>
class KeyStream {
    static constexpr KvFormat kKey = kKeyFormat<Policy>, kValue = kValueFormat<Policy>;

  public:
    __device__ KeyStream(const CacheView& c, int head, const int* blocks, int begin, int end, int all,
                         uint8_t* ring)
        : c_(c),
          head_(head),
          keys_(c.data + head * int64_t(c.head_bytes[0])),
          values_(c.data + c.heads * int64_t(c.head_bytes[0]) + head * int64_t(c.head_bytes[1])),
          params_(c.data + c.heads * (int64_t(c.head_bytes[0]) + c.head_bytes[1]) +
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
            const int key = next_ + i * kDecodeWarps * Keys;
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
        uint8_t* stage = ring_ + take_ * kStageBytes<Policy, D, Keys>;
        take_ = take_ + 1 == Stages ? 0 : take_ + 1;
        return stage;
    }

    // The first key of the tile to take, or false when all were taken.
    __device__ bool next_tile(int& key) {
        if (read_ >= end_) return false;
        key = read_;
        read_ += kDecodeWarps * Keys;
        return true;
    }

    // Whether token `key`, the last of all, is in one of this warp's tiles.
    __device__ bool owns(int key) const {
        const int first = read_;
        return key < end_ && key >= first && (key - first) / Keys % kDecodeWarps == 0;
    }

    // Rotates and caches the new token `key`, whose key is at `row` of qkv and whose value heads * D further.
    template <class T>
    __device__ void store_fresh(const T* row, int key, const float* cos, const float* sin,
                                FreshRows<Policy, D>& fresh) const {
        const int64_t block = blocks_[key >> shift_] * c_.block_bytes;
        const int place = key & (c_.block_len - 1);
        const auto at = [&](const uint8_t* base, int bytes) {
            return const_cast<uint8_t*>(base) + block + place * bytes;
        };
        __half2* params = reinterpret_cast<__half2*>(at(params_, 4));
        WarpRow<D> k, v;
        load_row<T, D>(row, k);
        load_row<T, D>(row + c_.heads * D, v);
        rotate_row<D>(cos, sin, k);
        if (c_.rotated) {
            if (c_.centre) {
#pragma unroll
                for (int i = 0; i < D / 32; ++i)
                    k[i] -= c_.centre[head_ * D + threadIdx.x % 32 * (D / 32) + i];
            }
            hadamard_row<D>(k);
            hadamard_row<D>(v);
        }
        fresh.key.template store<T>(k, at(keys_, DecodeFormat<kKey, D>::kRow), params);
        fresh.value.template store<T>(v, at(values_, DecodeFormat<kValue, D>::kRow),
                                      params + c_.heads * int64_t(c_.param_bytes) / 4);
        __syncwarp();
    }

  private:
    __device__ void request() {
        if (next_ < end_) {
            const int lane = threadIdx.x % 32, place = next_ & (c_.block_len - 1);
            const int64_t block = block_ * c_.block_bytes;
            const int valid = all_ - next_;
            uint8_t* stage = ring_ + write_ * kStageBytes<Policy, D, Keys>;
            request_rows<kKey, D, Keys>(stage, keys_ + block + place * DecodeFormat<kKey, D>::kRow, valid,
                                        lane);
            request_rows<kValue, D, Keys>(stage + kTileBytes<kKey, D, Keys>,
                                          values_ + block + place * DecodeFormat<kValue, D>::kRow, valid,
                                          lane);
            if constexpr (Policy != 0) {
                if (lane < Keys / 2) {
                    const int value = lane / (Keys / 4), chunk = lane % (Keys / 4);
                    copy_async(
                        stage + kParamsAt<Policy, D, Keys> + 16 * lane,
                        params_ + block + value * int64_t(c_.heads) * c_.param_bytes + 4 * place + 16 * chunk,
                        16);
                }
            }
            next_ += kDecodeWarps * Keys;
        }
        commit_copies();
        write_ = write_ + 1 == Stages ? 0 : write_ + 1;
    }

    const CacheView& c_;
    const int head_;
    const uint8_t *keys_, *values_, *params_;
    const int* blocks_;
    const int shift_, end_, all_;
    int next_, read_, block_ = 0, write_ = 0, take_ = 0;
    int first_blocks_[Stages];
    uint8_t* ring_;
};

}  // namespace turbomill::cuda
