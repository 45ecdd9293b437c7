#include "store/expand.h"

#include <algorithm>

#include "core/half.h"
#include "core/thread_pool.h"

namespace turbomill {
namespace {

// Of scales, zeros or mins [N/64, G, 64] in pair order.
float param(const Linear& w, const void* base, int row, int group) {
    const int r = row % 64, position = r / 16 * 16 + r % 8 * 2 + r % 16 / 8;
    const size_t at = (size_t(row / 64) * w.groups + group) * 64 + position;
    const uint16_t bits = static_cast<const uint16_t*>(base)[at];
    return w.dtype == DType::F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// Of w4.n64k64 or w8.n64k64, see convert/FORMAT.md.
int code(const Linear& w, int row, int column) {
    const int r = row % 16, c = column % 16;
    const int at = c % 8 / 2 * 16 + column % 64 / 16 * 4 + c % 2 * 2 + c / 8;  // in a row's 64 codes
    const size_t tile = size_t(row / 64) * w.k_tiles + column / 64;
    const uint8_t* pair = w.codes + (tile * 4 + row % 64 / 16) * 128 * w.bits + r % 8 * 16 * w.bits;
    if (w.bits == 8) return pair[r / 8 * 64 + at];
    return r < 8 ? pair[at] & 15 : pair[at] >> 4;
}

}  // namespace

void expand_row(const Linear& w, int row, float* out) {
    const float middle = w.bits == 4 ? 8.f : 128.f;
    for (int group = 0; group * w.group < w.k; ++group) {
        const float scale = param(w, w.scales, row, group);
        const float zero = w.mins ? 0.f : w.zeros ? param(w, w.zeros, row, group) : middle;
        const float min = w.mins ? param(w, w.mins, row, group) : 0.f;
        const int end = group * w.group + w.group < w.k ? group * w.group + w.group : w.k;
        for (int column = group * w.group; column < end; ++column) {
            const int input = w.order.empty() ? column : w.order[column];
            out[input] = (code(w, row, column) - zero) * scale + min;
        }
    }
}

std::vector<float> expand(const Linear& w) {
    std::vector<float> out(size_t(w.n) * w.k);
    ThreadPool pool(0);
    pool.run((w.n + 63) / 64, [&](int tile, int) {
        for (int row = tile * 64; row < std::min(w.n, tile * 64 + 64); ++row)
            expand_row(w, row, out.data() + size_t(row) * w.k);
    });
    return out;
}

}  // namespace turbomill
