// A 4-bit weight as the numbers it stands for, slowly: for backends whose kernels do not read all that it
// has.
#pragma once

#include <vector>

#include "store/weights.h"

namespace turbomill {

// fp32 [N, K], each input in its own place. `w` has codes.
std::vector<float> expand(const Linear& w);

}  // namespace turbomill
