#include "kernels/cuda/w4_grouped.cuh"

namespace turbomill::cuda {

template bool launch_grouped<__nv_bfloat16>(FusedKernel kernel, bool whole, const FusedMaps& maps,
                                            const GroupedJob& job, int multiprocessors, cudaStream_t stream);

}  // namespace turbomill::cuda
