// Which tiles a thread block of the fused kernels computes, and which part of K.
#pragma once

#include "kernels/cuda/fused_linear.h"

namespace turbomill::cuda {

// A thread block's tiles, one after the other, and its part of the K of each.
class FusedWork {
  public:
    // `halved`: two neighbours share their tiles, not their K.
    __device__ FusedWork(const FusedJob& job, int stage_tiles, bool halved) {
        const int team = halved ? 2 : job.splits, rank = halved ? 0 : blockIdx.x % team;
        step_ = gridDim.x / team;
        tiles_ = job.n_blocks * job.m_tiles;
        tile_ = int(blockIdx.x / team) - step_;
        const int stages = (job.w.k_tiles + stage_tiles - 1) / stage_tiles;
        begin = stages * rank / job.splits * stage_tiles;
        end = min(stages * (rank + 1) / job.splits * stage_tiles, job.w.k_tiles);
    }

    // To the next tile, if there is one.
    __device__ bool next(const FusedJob& job) {
        if ((tile_ += step_) >= tiles_) return false;
        // Tiles that run at the same time share activations and weights: a band of token tiles, N by N.
        constexpr int kBand = 16;
        const int width = min(job.m_tiles, kBand), band = tile_ / (width * job.n_blocks);
        const int here = min(width, job.m_tiles - band * width), rest = tile_ - band * width * job.n_blocks;
        place = {rest / here, band * width + rest % here};
        return true;
    }

    int begin, end;  // K tiles
    int2 place;      // block (halved: pair of blocks) of N, tile of tokens

  private:
    int tile_, step_, tiles_;
};

// Groups of scales in a stage, and stages until the next group, when a group has several.
template <bool Whole, class Sizes>
__device__ inline int fused_stage_groups(const PackedView& w) {
    return Whole ? 1 : Sizes::kTiles * 64 / w.group;
}
template <bool Whole, class Sizes>
__device__ inline int fused_period(const PackedView& w) {
    return !Whole ? 1 : w.groups == 1 ? 1 << 30 : w.group / (64 * Sizes::kTiles);
}

// The stages of all of a thread block's tiles, for the copying thread: no divisions but where a tile begins.
template <bool Whole, class Sizes>
class FusedStages {
  public:
    __device__ FusedStages(const FusedWork& work, const FusedJob& job)
        : work_(work), job_(job), period_(fused_period<Whole, Sizes>(job.w)) {
        enter();
    }

    __device__ void next() {
        k += Sizes::kTiles;
        if (--left_ == 0) group += fused_stage_groups<Whole, Sizes>(job_.w), left_ = period_;
        if (k >= work_.end) enter();
    }
    __device__ int2 place() const { return work_.place; }

    bool more;
    int k, group;  // the stage's first of each

  private:
    __device__ void enter() {
        more = work_.next(job_);
        k = work_.begin;
        group = 64 * k / job_.w.group;
        left_ = period_ - k / Sizes::kTiles % period_;
    }

    FusedWork work_;
    const FusedJob& job_;
    int period_, left_;
};

}  // namespace turbomill::cuda
