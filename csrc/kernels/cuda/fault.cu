// A kernel that breaks the GPU's context, for tests of what an engine does then.
#include "kernels/cuda/error.h"
#include "kernels/cuda/launch.h"

namespace turbomill::cuda {
namespace {

__global__ void illegal_access_kernel(int* nowhere) {
    *nowhere = 1;
}

}  // namespace

void illegal_access(cudaStream_t stream) {
    illegal_access_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(16));
    check_launch("illegal_access");
}

}  // namespace turbomill::cuda
