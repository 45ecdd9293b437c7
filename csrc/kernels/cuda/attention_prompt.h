// Hopper's attention of prompts, as the code that launches it sees it.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

// What the copy engine knows of the operands: boxes of 64 dimensions, swizzled. Dimensions past the head's
// arrive as zeros.
struct PromptMaps {
    CUtensorMap queries;  // [T, Nq + 2 Nkv, D], boxes of [tokens of a tile, group, 64]
    CUtensorMap cache;    // [blocks, 2 Nkv, P, D], boxes of [1, 1, rows, 64]
};

struct PromptJob {
    void* out;  // [T, Nq, D]
    const SliceInfo* slices;
    const int* blocks;  // null: a slice's blocks are its tiles' first_slot and those that follow
    const QueryTile* tiles;
    int tile_count, num_heads, heads, group, head_dim;
    int tile_tokens;           // of a tile
    int block_len, box_shift;  // tokens of a block; log2 of the rows of a box
    Scores scores;

    // The first key that a row of the tile sees.
    __host__ __device__ int first_key(const SliceInfo& slice, const QueryTile& tile) const {
        const int first = slice.context + tile.first / group + 1 - scores.window;
        return first > 0 ? first : 0;
    }
};

template <class T>
void launch_prompt(const PromptMaps& maps, const PromptJob& job, int multiprocessors, cudaStream_t stream);

}  // namespace turbomill::cuda
