// Keys that order the tokens of a row of logits.
#pragma once

#include <cstdint>

namespace turbomill::cuda {

// Greater for a greater logit, then for a lower id; no two tokens share one.
__device__ inline uint64_t key_of(float logit, int id) {
    const unsigned bits = __float_as_uint(logit + 0.f);  // -0 becomes 0
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(ordered) << 32 | (0xffffffffu - unsigned(id));
}
__device__ inline int id_of(uint64_t key) {
    return int(0xffffffffu - unsigned(key));
}

}  // namespace turbomill::cuda
