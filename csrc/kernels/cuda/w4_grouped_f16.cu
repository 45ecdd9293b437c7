#include "kernels/cuda/w4_grouped.cuh"

namespace turbomill::cuda {

template bool launch_grouped<__half>(FusedKernel kernel, bool whole, const FusedMaps& maps,
                                     const GroupedJob& job, int multiprocessors, cudaStream_t stream);

}  // namespace turbomill::cuda
