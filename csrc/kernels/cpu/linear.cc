#include "kernels/cpu/linear.h"

#include <algorithm>
#include <stdexcept>

#include "core/types.h"
#include "kernels/cpu/blas.h"

namespace turbomill::cpu {
namespace {

constexpr int kPanel = 192;    // rows of the weight a BLAS call sees: large enough to amortise its packing
constexpr int kFew = 64;       // rows a small-batch task takes
constexpr int kByteRows = 64;  // rows of bytes that a task multiplies at a time: they fit a cache

PackedWeight packed_view(const Linear& w) {
    return {w.codes, w.scales, w.zeros, w.mins, w.dtype, w.k_tiles, w.groups, w.group, w.bits};
}

// Columns of a packed weight are stored in an order of their own; activations are brought to it once per
// call.
int stored_columns(const Linear& w) {
    return w.codes ? w.k_tiles * 64 : w.k;
}

}  // namespace

LinearRunner::LinearRunner(const Kernels& kernels, ThreadPool& pool, int activation_bits, bool deterministic)
    : k_(kernels),
      pool_(pool),
      int8_(activation_bits == 32 ? nullptr : int8_kernels()),
      two_bytes_(activation_bits == 16),
      deterministic_(deterministic),
      panels_(pool.size()),
      scratch_(pool.size()) {
    if (activation_bits != 32 && !int8_)
        throw std::invalid_argument("this CPU has no products of bytes (AVX-512 VNNI)");
}

int LinearRunner::chunk(int n, int most) const {
    const int tasks = pool_.size() * ceil_div(n, pool_.size() * most);
    return ceil_div(ceil_div(n, tasks), 16) * 16;
}

void LinearRunner::operator()(const Linear& w, const float* x, int rows, float* y) {
    int64_t ldx = w.k;
    if (w.codes) {
        ldx = stored_columns(w);
        permuted_.resize(std::max(permuted_.size(), size_t(rows) * ldx));
        const int side = lanes(rows);
        const size_t tiles = size_t(ceil_div(rows, side)) * side * w.k_tiles;
        if (int8_) {
            high_.resize(std::max(high_.size(), tiles * 64));
            if (two_bytes_) low_.resize(std::max(low_.size(), tiles * 64));
            byte_scales_.resize(std::max(byte_scales_.size(), tiles));
            byte_sums_.resize(std::max(byte_sums_.size(), 2 * tiles));
        }
        if (!w.order.empty()) gathered_.resize(std::max(gathered_.size(), size_t(rows) * w.k));
        pool_.run(rows, [&](int m, int) {
            const float* row = x + int64_t(m) * w.k;
            if (!w.order.empty()) {
                float* gathered = gathered_.data() + int64_t(m) * w.k;
                for (int i = 0; i < w.k; ++i) gathered[i] = row[w.order[i]];
                row = gathered;
            }
            k_.permute_packed(row, w.k, permuted_.data() + m * ldx, 1, w.k, w.k_tiles);
            if (!int8_) return;
            const int64_t block = int64_t(m / side) * w.k_tiles * side;
            const int lane = m % side;
            int8_t* low = two_bytes_ ? low_.data() + block * 64 + lane * 4 : nullptr;
            int8_->quantize(permuted_.data() + m * ldx, w.k_tiles, side, high_.data() + block * 64 + lane * 4,
                            low, byte_scales_.data() + block + lane, byte_sums_.data() + 2 * block + lane);
        });
        if (int8_) return byte_rows(w, rows, y);
        x = permuted_.data();
    }
    if (rows <= kMaxRows || deterministic_) {
        for (int64_t m = 0; m < rows; m += kMaxRows)
            few_rows(w, x + m * ldx, ldx, std::min(kMaxRows, int(rows - m)), y + m * w.n);
    } else {
        many_rows(w, x, ldx, rows, y);
    }
}

void LinearRunner::few_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y) {
    const int step = chunk(w.n, kFew);
    const PackedWeight view = packed_view(w);
    pool_.run(ceil_div(w.n, step), [&](int task, int) {
        const int n0 = task * step, n1 = std::min(w.n, n0 + step);
        if (w.codes) {
            for (int n = n0; n < n1; n += 16)
                k_.linear_packed(view, n / 16, x, y + n, w.n, rows, std::min(16, n1 - n));
        } else {
            k_.linear_dense(w.dtype, w.dense, x, ldx, y, w.n, rows, w.k, n0, n1);
        }
        add_bias(w, rows, y, n0, n1);
    });
}

void LinearRunner::many_rows(const Linear& w, const float* x, int64_t ldx, int rows, float* y) {
    const int step = chunk(w.n, kPanel), columns = stored_columns(w);
    const PackedWeight view = packed_view(w);
    const bool converts = w.codes || w.dtype != DType::F32;
    if (converts)  // every worker's, whoever comes to work
        for (auto& scratch : panels_) scratch.resize(std::max(scratch.size(), size_t(step) * columns));
    pool_.run(ceil_div(w.n, step), [&](int task, int worker) {
        const int n0 = task * step, n1 = std::min(w.n, n0 + step);
        const float* panel = static_cast<const float*>(w.dense) + int64_t(n0) * w.k;
        if (converts) {
            auto& scratch = panels_[worker];
            if (w.codes) {
                for (int n = n0; n < n1; n += 16)
                    k_.dequant_packed(view, n / 16, scratch.data() + int64_t(n - n0) * columns);
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

void LinearRunner::byte_rows(const Linear& w, int rows, float* y) {
    const int step = chunk(w.n, kFew);
    const PackedWeight view = packed_view(w);
    const size_t needed = size_t(int8_->scratch_bytes(std::min(rows, kByteRows))) + 64;
    for (auto& scratch : scratch_) scratch.resize(std::max(scratch.size(), needed));
    pool_.run(ceil_div(w.n, step), [&](int task, int worker) {
        const int n0 = task * step, n1 = std::min(w.n, n0 + step);
        auto& scratch = scratch_[worker];
        auto* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
        for (int m = 0; m < rows; m += kByteRows) {
            const int64_t at = int64_t(m) * w.k_tiles;
            const Int8Rows x = {high_.data() + at * 64,
                                two_bytes_ ? low_.data() + at * 64 : nullptr,
                                byte_scales_.data() + at,
                                byte_sums_.data() + 2 * at,
                                std::min(kByteRows, rows - m),
                                w.k_tiles,
                                lanes(rows)};
            for (int n = n0; n < n1; n += 16)
                int8_->linear(view, n / 16, x, y + int64_t(m) * w.n + n, w.n, std::min(16, n1 - n), aligned);
        }
        add_bias(w, rows, y, n0, n1);
    });
}

void LinearRunner::add_bias(const Linear& w, int rows, float* y, int n0, int n1) const {
    if (w.bias.empty()) return;
    for (int m = 0; m < rows; ++m) k_.add(w.bias.data() + n0, y + int64_t(m) * w.n + n0, n1 - n0);
}

}  // namespace turbomill::cpu
