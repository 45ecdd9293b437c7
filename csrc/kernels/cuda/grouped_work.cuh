// Tiles of experts' products, whose rows of tokens are read from memory.
#pragma once

#include <algorithm>

#include "kernels/cuda/w4_grouped.h"

namespace turbomill::cuda {

// The tiles of a thread block, expert by expert, those of one block of N together.
template <int Tokens>
class GroupedWork {
  public:
    __device__ explicit GroupedWork(const GroupedJob& job)
        : job_(job), tile_(int(blockIdx.x) - int(gridDim.x)) {
        enter(0);
    }

    __device__ bool next() {
        tile_ += gridDim.x;
        while (tile_ >= tiles_) {
            tile_ -= tiles_;
            if (expert + 1 == job_.experts) return false;
            enter(expert + 1);
        }
        const int m_tiles = tiles_ / job_.fused.n_blocks;
        place = {tile_ / m_tiles, tile_ % m_tiles};
        return true;
    }

    int expert, first_row, rows;  // rows of the expert
    int2 place;                   // block of N, tile of tokens

  private:
    __device__ void enter(int e) {
        expert = e;
        first_row = job_.offsets[e];
        rows = job_.offsets[e + 1] - first_row;
        tiles_ = job_.fused.n_blocks * ((rows + Tokens - 1) / Tokens);
    }

    const GroupedJob& job_;
    int tile_, tiles_;
};

// Thread blocks that have anything to do: no more tiles than if every expert had one that is not full.
inline unsigned grouped_blocks(const GroupedJob& job, int tokens, int most) {
    const int64_t tiles =
        int64_t(job.fused.n_blocks) * (job.fused.rows / tokens + std::min(job.experts, job.fused.rows));
    return unsigned(std::min<int64_t>(tiles, most));
}

}  // namespace turbomill::cuda
