#include "kernels/cuda/fused_linear_launch.cuh"

namespace turbomill::cuda {

template bool launch_fused<4, __half>(const FusedPlan&, bool, const FusedMaps&, const FusedJob&, int, bool,
                                      cudaStream_t);

bool w4_fused_runs() {
    static std::atomic<int> answers[64];  // by device: 0 not asked, 1 no, 2 yes
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    std::atomic<int>& answer = answers[device % 64];
    if (!answer) {
        cudaFuncAttributes attributes{};
        const bool runs = cudaFuncGetAttributes(&attributes, fused_kernel<__half, 4, 2, 8, 2, true, false>) ==
                              cudaSuccess &&
                          attributes.sharedSizeBytes > 0;  // the empty body of other architectures has none
        cudaGetLastError();
        answer = runs ? 2 : 1;
    }
    return answer == 2;
}

}  // namespace turbomill::cuda
