#include "kernels/cpu/linear.h"

#include <algorithm>

#include "core/types.h"
#include "kernels/cpu/blas.h"

namespace turbomill::cpu {
namespace {

constexpr int kPanel = 192;  // rows of the weight a BLAS call sees: large enough to amortise its packing
constexpr int kFew = 64;     // rows a small-batch task takes

W4 w4_view(const Linear& w) {
    return {w.codes, w.scales, w.zeros, w.mins, w.dtype, w.k_tiles, w.groups, w.group};
}

// Columns of a w4 weight are stored in an order of their own; activations are brought to it once per call.
int stored_columns(const Linear& w) {
    return w.codes ? w.k_tiles * 64 : w.k;
}

}  // namespace

int LinearRunner::chunk(int n, int most) const {
    const int tasks = pool_.size() * ceil_div(n, pool_.size() * most);
    return ceil_div(ceil_div(n, tasks), 16) * 16;
}

void LinearRunner::operator()(const Linear& w, const float* x, int rows, float* y) {
    int64_t ldx = w.k;
    if (w.codes) {
        ldx = stored_columns(w);
        permuted_.resize(std::max(permuted_.size(), size_t(rows) * ldx));
        if (!w.order.empty()) gathered_.resize(std::max(gathered_.size(), size_t(rows) * w.k));
        pool_.run(rows, [&](int m, int) {
            const float* row = x + int64_t(m) * w.k;
            if (!w.order.empty()) {
                float* gathered = gathered_.data() + int64_t(m) * w.k;
                for (int i = 0; i < w.k; ++i) gathered[i] = row[w.order[i]];
                row = gathered;
            }
            k_.permute_w4(row, w.k, permuted_.data() + m * ldx, 1, w.k, w.k_tiles);
        });
        x = permuted_.data();
    }
    if (rows <= kMaxRows) {
        few_rows(w, x, ldx, rows, y);
    } else {
        many_rows(w, x, ldx, rows, y);
    }
}

void LinearRunner::few_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y) {
    const int step = chunk(w.n, kFew);
    const W4 view = w4_view(w);
    pool_.run(ceil_div(w.n, step), [&](int task, int) {
        const int n0 = task * step, n1 = std::min(w.n, n0 + step);
        if (w.codes) {
            for (int n = n0; n < n1; n += 16)
                k_.linear_w4(view, n / 16, x, y + n, w.n, rows, std::min(16, n1 - n));
        } else {
            k_.linear_dense(w.dtype, w.dense, x, ldx, y, w.n, rows, w.k, n0, n1);
        }
        add_bias(w, rows, y, n0, n1);
    });
}

void LinearRunner::many_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y) {
    const int step = chunk(w.n, kPanel), columns = stored_columns(w);
    const W4 view = w4_view(w);
    pool_.run(ceil_div(w.n, step), [&](int task, int worker) {
        const int n0 = task * step, n1 = std::min(w.n, n0 + step);
        const float* panel = static_cast<const float*>(w.dense) + int64_t(n0) * w.k;
        if (w.codes || w.dtype != DType::F32) {
            auto& scratch = panels_[worker];
            scratch.resize(std::max(scratch.size(), size_t(step) * columns));
            if (w.codes) {
                for (int n = n0; n < n1; n += 16)
                    k_.dequant_w4(view, n / 16, scratch.data() + int64_t(n - n0) * columns);
            } else {
                k_.to_float(w.dtype, static_cast<const uint16_t*>(w.dense) + int64_t(n0) * w.k,
                            scratch.data(), int64_t(n1 - n0) * w.k);
            }
            panel = scratch.data();
        }
        gemm_nt(rows, n1 - n0, columns, x, int(ldx), panel, columns, y + n0, w.n);
        add_bias(w, rows, y, n0, n1);
    });
}

void LinearRunner::add_bias(const Linear& w, int rows, float* y, int n0, int n1) const {
    if (w.bias.empty()) return;
    for (int m = 0; m < rows; ++m) k_.add(w.bias.data() + n0, y + int64_t(m) * w.n + n0, n1 - n0);
}

}  // namespace turbomill::cpu
