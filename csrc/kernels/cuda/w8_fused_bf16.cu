#include "kernels/cuda/fused_linear_launch.cuh"

namespace turbomill::cuda {

template bool launch_fused<8, __nv_bfloat16>(const FusedPlan&, bool, const FusedMaps&, const FusedJob&, int,
                                             bool, cudaStream_t);

}  // namespace turbomill::cuda
