// A packed weight as the numbers it stands for, slowly: for rows of an embedding, and for backends whose
// kernels do not read all that it has.
#pragma once

#include <vector>

#include "store/weights.h"

namespace turbomill {

// fp32 [N, K], each input in its own place, by every core. `w` has codes.
std::vector<float> expand(const Linear& w);
// Row `row` of it, fp32 [K].
void expand_row(const Linear& w, int row, float* out);

}  // namespace turbomill
