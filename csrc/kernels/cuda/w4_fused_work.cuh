// Which tiles a thread block of the fused W4A16 kernels computes, and which parts of K.
#pragma once

#include "kernels/cuda/w4_fused.h"

namespace turbomill::cuda {

// Block of N and tile of tokens. Tiles that run at the same time share activations and weights: a band of
// token tiles, N by N.
__device__ inline int2 fused_place(const FusedJob& job, int tile) {
    constexpr int kBand = 16;
    const int width = min(job.m_tiles, kBand), band = tile / (width * job.n_blocks);
    const int here = min(width, job.m_tiles - band * width), rest = tile - band * width * job.n_blocks;
    return {rest / here, band * width + rest % here};
}

// A thread block's pieces, one after the other: a tile and a range of its K. Striped, the stages of all tiles
// lie in one line, of which each block takes the same share: most blocks begin within a tile and end within
// another. Otherwise a block has the same part of K of every tile that it takes.
template <bool Striped>
class FusedWork {
  public:
    __device__ FusedWork(const FusedJob& job, int stage_tiles) : stages_(job.stages), stage_tiles_(stage_tiles) {
        const int tiles = job.n_blocks * job.m_tiles;
        k_tiles_ = job.w.k_tiles;
        if constexpr (Striped) {
            step_ = blockIdx.x * job.share;
            last_ = min(step_ + job.share, tiles * stages_);
        } else {
            const int rank = blockIdx.x % job.splits;
            step_ = gridDim.x / job.splits;
            last_ = tiles;
            tile = int(blockIdx.x / job.splits) - step_;
            range(stages_ * rank / job.splits, stages_ * (rank + 1) / job.splits);
        }
    }

    // To the next piece, if there is one.
    __device__ bool next() {
        if constexpr (!Striped) return (tile += step_) < last_;
        if (step_ >= last_) return false;
        tile = step_ / stages_;
        const int first = step_ - tile * stages_, count = min(stages_ - first, last_ - step_);
        range(first, first + count);
        step_ += count;
        return true;
    }

    int tile, begin, end;  // K tiles

  private:
    __device__ void range(int first, int last) {
        begin = first * stage_tiles_;
        end = min(last * stage_tiles_, k_tiles_);
    }

    int stages_, stage_tiles_, k_tiles_;
    int step_, last_;  // of tiles; striped, the stage reached of all tiles', and where the share ends
};

// Groups of scales in a stage, and stages until the next group, when a group has several.
template <bool Whole, class Sizes>
__device__ inline int fused_stage_groups(const W4View& w) {
    return Whole ? 1 : Sizes::kTiles * 64 / w.group;
}
template <bool Whole, class Sizes>
__device__ inline int fused_period(const W4View& w) {
    return !Whole ? 1 : w.groups == 1 ? 1 << 30 : w.group / (64 * Sizes::kTiles);
}

// The stages of all of a thread block's pieces, for the copying thread: no divisions but where a piece begins.
template <bool Whole, bool Striped, class Sizes>
class FusedStages {
  public:
    __device__ FusedStages(const FusedWork<Striped>& work, const FusedJob& job)
        : work_(work), job_(job), period_(fused_period<Whole, Sizes>(job.w)) {
        enter();
    }

    __device__ void next() {
        k += Sizes::kTiles;
        if (--left_ == 0) group += fused_stage_groups<Whole, Sizes>(job_.w), left_ = period_;
        if (k >= work_.end) enter();
    }

    bool more;
    int k, group;  // the stage's first of each
    int2 place;

  private:
    __device__ void enter() {
        more = work_.next();
        if (!more) return;
        place = fused_place(job_, work_.tile);
        k = work_.begin;
        group = 64 * k / job_.w.group;
        left_ = period_ - k / Sizes::kTiles % period_;
    }

    FusedWork<Striped> work_;
    const FusedJob& job_;
    int period_, left_;
};

}  // namespace turbomill::cuda
