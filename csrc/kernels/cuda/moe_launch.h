// The kernels of a mixture of experts, as plain C++ (launch.h says how). A *pair* is a token and one of its
// experts: pair t * top + j is token t and the j-th of its chosen. Sorted by expert, the pairs of expert e
// have the places [offsets[e], offsets[e + 1]); nothing of that passes through the host.
#pragma once

#include "kernels/cuda/launch.h"

namespace turbomill::cuda {

struct Routing {
    int tokens, experts, top;
    int* chosen;     // [T, top] experts, likeliest first
    float* weights;  // [T, top]
    int* offsets;    // [E + 1]
    int* pairs;      // [T top]: the pair at each place
    int* places;     // [T top]: the place of each pair

    int pair_count() const { return tokens * top; }
};
// Chooses each token's experts from the router's logits [T, E], the lower of equals first, and sorts the
// pairs. Weights are a softmax over all experts, or, if `normalise`, over the chosen ones. Logits that are
// not finite choose some experts too.
void moe_route(const float* logits, bool normalise, const Routing& routing, cudaStream_t stream);

// sorted [T top, H] = x [T, H], each token's row at the places of its pairs
void moe_gather(DType type, const void* x, const Routing& routing, int h, void* sorted, cudaStream_t stream);

// gate [T] = sigmoid(x [T, H] . w [H])
void moe_shared_gate(DType type, const void* x, const void* w, int tokens, int h, float* gate,
                     cudaStream_t stream);

// y [T, H] = the weighted sum of each token's rows of `sorted`, in the order of its experts, and, where there
// is a shared expert, gate [T] times shared [T, H]
void moe_combine(DType type, const void* sorted, const Routing& routing, const float* gate,
                 const void* shared, int h, void* y, cudaStream_t stream);

// The rows of sorted activations that each expert has.
struct ExpertRows {
    const int* offsets;  // [E + 1]
    int experts, rows;   // rows: of all experts
};

// y [rows, N] = x [rows, K] w[e]^T, for the rows of each expert e. Weights of expert e follow those of e - 1.
// w [E, N, K] in T.
void grouped_dense(DType type, const void* w, int n, int k, const void* x, void* y, const ExpertRows& rows,
                   cudaStream_t stream);
// The same on Hopper, where it fits: y [rows, N/2] = silu(gate) * up if `gated`.
bool grouped_dense_fused_fits(DType type, int k);
void grouped_dense_fused(DType type, const void* w, int n, int k, const void* x, void* y,
                         const ExpertRows& rows, int multiprocessors, bool gated, cudaStream_t stream);
// 4-bit, T 16-bit; `w`: of expert 0.
void grouped_w4(DType type, const W4View& w, const void* x, void* y, const ExpertRows& rows,
                cudaStream_t stream);
// Likewise on Hopper, where w4_fused_fits.
void grouped_w4_fused(DType type, const W4View& w, const void* x, void* y, const ExpertRows& rows,
                      int multiprocessors, bool gated, cudaStream_t stream);

}  // namespace turbomill::cuda
