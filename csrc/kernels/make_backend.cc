#include "kernels/make_backend.h"

#include <stdexcept>

#include "kernels/cpu/backend.h"
#ifdef TM_CUDA
#include "kernels/cuda/backend.h"
#endif

namespace turbomill {

std::unique_ptr<Backend> make_backend(const ModelConfig& model, const EngineConfig& config,
                                      const Weights& weights) {
    const auto& inv_freq = weights.inv_freq(model, config.session_len);
    if (config.device == "cpu")
        return std::make_unique<cpu::CpuBackend>(model, config, inv_freq, weights.rope_local_inv_freq);
#ifdef TM_CUDA
    return std::make_unique<cuda::CudaBackend>(model, config, weights, inv_freq, weights.rope_local_inv_freq);
#else
    throw std::invalid_argument("device is '" + config.device +
                                "', but this build has the cpu backend only: rebuild with TURBOMILL_CUDA=ON");
#endif
}

}  // namespace turbomill
