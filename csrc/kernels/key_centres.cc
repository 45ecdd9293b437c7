#include "kernels/key_centres.h"

#include <algorithm>

namespace turbomill {

MeanRotation::MeanRotation(const std::vector<float>& cos, const std::vector<float>& sin, int half)
    : half_(half), cos_(half), sin_(half) {
    const size_t positions = half ? cos.size() / half : 0;
    for (int i = 0; i < half; ++i) {
        double c = 0, s = 0;
        for (size_t p = 0; p < positions; ++p) c += cos[p * half + i], s += sin[p * half + i];
        cos_[i] = float(c / double(std::max<size_t>(positions, 1)));
        sin_[i] = float(s / double(std::max<size_t>(positions, 1)));
    }
}

void MeanRotation::apply(float* head) const {
    for (int i = 0; i < half_; ++i) {
        const float a = head[i], b = head[half_ + i];
        head[i] = a * cos_[i] - b * sin_[i];
        head[half_ + i] = b * cos_[i] + a * sin_[i];
    }
}

void KeyCentres::begin() {
    measuring_ = true;
    for (auto& centre : centres_) centre.clear();
    std::fill(counts_.begin(), counts_.end(), 0);
}

void KeyCentres::add(int layer, const float* keys, int tokens, int stride) {
    const int width = model_.num_kv_heads * model_.head_dim;
    auto& sum = centres_[layer];
    sum.resize(width, 0.f);
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < width; ++i) sum[i] += keys[size_t(t) * stride + i];
    counts_[layer] += tokens;
}

void KeyCentres::end(const MeanRotation& rotation, const MeanRotation& local) {
    measuring_ = false;
    for (int layer = 0; layer < int(centres_.size()); ++layer) {
        auto& centre = centres_[layer];
        for (float& v : centre) v /= float(counts_[layer]);
        for (size_t head = 0; head < centre.size(); head += model_.head_dim)
            (model_.local_rope(layer) ? local : rotation).apply(centre.data() + head);
    }
}

}  // namespace turbomill
