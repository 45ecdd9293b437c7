#include "kernels/cuda/attention_prompt.cuh"

namespace turbomill::cuda {

template void launch_prompt<__nv_bfloat16>(const PromptMaps&, const PromptJob&, int, cudaStream_t);

}  // namespace turbomill::cuda
