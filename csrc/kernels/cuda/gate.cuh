// The gate of a feed-forward layer.
#pragma once

namespace turbomill::cuda {

__device__ inline float silu_gated(float gate, float up) {
    return up * (gate / (1.f + expf(-gate)));
}

}  // namespace turbomill::cuda
