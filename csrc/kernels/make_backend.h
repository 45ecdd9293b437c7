// Chooses a backend by the configuration's device.
#pragma once

#include <memory>

#include "core/config.h"
#include "kernels/backend.h"
#include "store/weights.h"

namespace turbomill {

// `weights`, `model` and `config` outlive the backend. Throws std::invalid_argument for a device that this
// build does not know, std::runtime_error for one that cannot be used.
std::unique_ptr<Backend> make_backend(const ModelConfig& model, const EngineConfig& config,
                                      const Weights& weights);

}  // namespace turbomill
