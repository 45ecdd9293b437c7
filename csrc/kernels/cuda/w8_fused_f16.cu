#include "kernels/cuda/fused_linear_launch.cuh"

namespace turbomill::cuda {

template bool launch_fused<8, __half>(const FusedPlan&, bool, const FusedMaps&, const FusedJob&, int, bool,
                                      cudaStream_t);

}  // namespace turbomill::cuda
