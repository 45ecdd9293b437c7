#include "kernels/cuda/w4_fused_launch.cuh"

namespace turbomill::cuda {

template bool launch_fused<__nv_bfloat16>(const W4Plan&, bool, const FusedMaps&, const FusedJob&, int, bool,
                                          cudaStream_t);

}  // namespace turbomill::cuda
