// The centres that rotated layers subtract from their keys: Backend::begin_centring says why.
#pragma once

#include <vector>

#include "core/config.h"

namespace turbomill {

// What the rotary embedding does to a constant vector, averaged over the positions of a session: channels
// that turn many times lose their mean, slow ones keep it.
class MeanRotation {
  public:
    // cos, sin [positions, half], of heads whose first 2 * half dimensions are rotated
    MeanRotation(const std::vector<float>& cos, const std::vector<float>& sin, int half);

    void apply(float* head) const;  // [D]

  private:
    int half_;
    std::vector<float> cos_, sin_;  // [half]
};

class KeyCentres {
  public:
    explicit KeyCentres(const ModelConfig& model)
        : model_(model), centres_(model.num_layers), counts_(model.num_layers) {}

    void begin();
    bool measuring() const { return measuring_; }
    // Keys [tokens, Nkv D], rows `stride` apart, not rotated yet.
    void add(int layer, const float* keys, int tokens, int stride);
    // `local`: of the layers local_rope_layers.
    void end(const MeanRotation& rotation, const MeanRotation& local);

    // [Nkv, D], or null while the layer has none.
    const float* of(int layer) const {
        return measuring_ || centres_[layer].empty() ? nullptr : centres_[layer].data();
    }

  private:
    const ModelConfig& model_;
    std::vector<std::vector<float>> centres_;  // by layer: sums while measuring
    std::vector<int> counts_;
    bool measuring_ = false;
};

}  // namespace turbomill
