// The inner loops of kernels.h. CMake compiles this file once per instruction set, with TM_ISA naming the
// set. It must not instantiate templates or inline functions shared with other files (the linker would keep
// one copy, compiled for the wrong CPU), so it uses raw pointers and plain loops only.
#include <cmath>

#include "kernels/cpu/isa_kv.h"
#include "kernels/cpu/isa_packed.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/vec.h"

#define TM_CONCAT_(a, b) a##b
#define TM_CONCAT(a, b) TM_CONCAT_(a, b)
#define TM_STRING_(a) #a
#define TM_STRING(a) TM_STRING_(a)

namespace {

using turbomill::DType;

inline vf load_as(DType dtype, const void* base, int64_t i) {
    switch (dtype) {
        case DType::F16:
            return load_f16(static_cast<const uint16_t*>(base) + i);
        case DType::BF16:
            return load_bf16(static_cast<const uint16_t*>(base) + i);
        default:
            return load(static_cast<const float*>(base) + i);
    }
}

inline float scalar_as(DType dtype, const void* base, int64_t i) {
    switch (dtype) {
        case DType::F16:
            return f16_scalar(static_cast<const uint16_t*>(base)[i]);
        case DType::BF16:
            return turbomill::bf16_to_float(static_cast<const uint16_t*>(base)[i]);
        default:
            return static_cast<const float*>(base)[i];
    }
}

void to_float(DType dtype, const void* src, float* dst, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(dst + i, load_as(dtype, src, i));
    for (; i < n; ++i) dst[i] = scalar_as(dtype, src, i);
}

void from_float(DType dtype, const float* src, void* dst, int64_t n) {
    if (dtype == DType::F32) {
        std::memcpy(dst, src, size_t(n) * 4);
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(dst);
    int64_t i = 0;
    if (dtype == DType::F16) {
        for (; i + kLanes <= n; i += kLanes) store_f16(out + i, load(src + i));
        for (; i < n; ++i) out[i] = turbomill::float_to_f16(src[i]);
    } else {
        for (; i < n; ++i) out[i] = turbomill::float_to_bf16(src[i]);
    }
}

void rms_norm(const float* x, const float* w, float* y, int h, float eps) {
    vf squares{};
    int i = 0;
    for (; i + kLanes <= h; i += kLanes) {
        const vf v = load(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < h; ++i) total += x[i] * x[i];
    const float scale = 1.f / std::sqrt(total / float(h) + eps);
    for (i = 0; i + kLanes <= h; i += kLanes) store(y + i, load(x + i) * scale * load(w + i));
    for (; i < h; ++i) y[i] = x[i] * scale * w[i];
}

void add(const float* x, float* y, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, load(y + i) + load(x + i));
    for (; i < n; ++i) y[i] += x[i];
}

void rope(float* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

// out = g * sigmoid(z(g)) * up, with z of the activation
template <class Z>
inline void sigmoid_gate(const float* gate_up, float* out, int inter, Z z) {
    for (int i = 0; i < inter; i += 8) {
        float gate[16] = {}, result[16];
        std::memcpy(gate, gate_up + 2 * i, 32);
        const vf g = load(gate);
        store(result, g / (exp(-z(g)) + 1.f));
        for (int j = 0; j < 8; ++j) out[i + j] = result[j] * gate_up[2 * i + 8 + j];
    }
}

void silu_gate(const float* gate_up, float* out, int inter) {
    sigmoid_gate(gate_up, out, inter, [](vf g) { return g; });
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u)
void gelu_gate(const float* gate_up, float* out, int inter) {
    sigmoid_gate(gate_up, out, inter, [](vf g) { return 1.5957691216057308f * (g + 0.044715f * g * g * g); });
}

// tanh(u) = 1 - 2 / (exp(2 u) + 1)
void softcap(float* x, int64_t n, float scale, float cap) {
    const float twice = 2.f * scale / cap;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const vf e = exp(load(x + i) * twice);
        store(x + i, cap - 2.f * cap / (e + 1.f));
    }
    for (; i < n; ++i) x[i] = cap * std::tanh(x[i] * scale / cap);
}

template <int Rows, DType Type>
void dense_rows(const void* w, const float* x, int64_t ldx, float* y, int64_t ldy, int k_dim, int n0,
                int n1) {
    for (int n = n0; n < n1; ++n) {
        const int64_t row = int64_t(n) * k_dim;
        vf acc[Rows] = {};
        int k = 0;
        for (; k + kLanes <= k_dim; k += kLanes) {
            const vf v = load_as(Type, w, row + k);
            for (int m = 0; m < Rows; ++m) acc[m] += v * load(x + m * ldx + k);
        }
        float tail[Rows];
        for (int m = 0; m < Rows; ++m) tail[m] = sum(acc[m]);
        for (; k < k_dim; ++k) {
            const float v = scalar_as(Type, w, row + k);
            for (int m = 0; m < Rows; ++m) tail[m] += v * x[m * ldx + k];
        }
        for (int m = 0; m < Rows; ++m) y[m * ldy + n] = tail[m];
    }
}

template <DType Type>
void dense_typed(const void* w, const float* x, int64_t ldx, float* y, int64_t ldy, int rows, int k_dim,
                 int n0, int n1) {
    switch (rows) {
        case 1:
            return dense_rows<1, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 2:
            return dense_rows<2, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 3:
            return dense_rows<3, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 4:
            return dense_rows<4, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 5:
            return dense_rows<5, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 6:
            return dense_rows<6, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 7:
            return dense_rows<7, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
        case 8:
            return dense_rows<8, Type>(w, x, ldx, y, ldy, k_dim, n0, n1);
    }
}

void linear_dense(DType dtype, const void* w, const float* x, int64_t ldx, float* y, int64_t ldy, int rows,
                  int k_dim, int n0, int n1) {
    switch (dtype) {
        case DType::F16:
            return dense_typed<DType::F16>(w, x, ldx, y, ldy, rows, k_dim, n0, n1);
        case DType::BF16:
            return dense_typed<DType::BF16>(w, x, ldx, y, ldy, rows, k_dim, n0, n1);
        default:
            return dense_typed<DType::F32>(w, x, ldx, y, ldy, rows, k_dim, n0, n1);
    }
}

void softmax_step(float* scores, int count, float scale, float* max_so_far, float* sum_so_far, float* out,
                  int d) {
    float top = *max_so_far;
    for (int i = 0; i < count; ++i) {
        scores[i] *= scale;
        top = scores[i] > top ? scores[i] : top;
    }
    const float shrink = std::exp(*max_so_far - top);  // 0 for the first block: max starts at -inf
    if (shrink != 1.f)
        for (int i = 0; i < d; ++i) out[i] *= shrink;
    vf total{};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const vf e = exp(load(scores + i) - top);
        store(scores + i, e);
        total += e;
    }
    float rest = sum(total);
    for (; i < count; ++i) {
        scores[i] = std::exp(scores[i] - top);
        rest += scores[i];
    }
    *sum_so_far = *sum_so_far * shrink + rest;
    *max_so_far = top;
}

void weighted_sum(const float* p, const float* v, int count, int d, float* out) {
    int i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        vf acc = load(out + i);
        for (int t = 0; t < count; ++t) acc += p[t] * load(v + int64_t(t) * d + i);
        store(out + i, acc);
    }
    for (; i < d; ++i)
        for (int t = 0; t < count; ++t) out[i] += p[t] * v[int64_t(t) * d + i];
}

}  // namespace

namespace turbomill::cpu {

extern const Kernels TM_CONCAT(kernels_, TM_ISA) = {
    TM_STRING(TM_ISA), to_float, from_float,   rms_norm,       add,           rope,           silu_gate,
    gelu_gate,         softcap,  linear_dense, permute_packed, linear_packed, dequant_packed, kv_quantize,
    kv_dequantize,     hadamard, softmax_step, weighted_sum,
};

}  // namespace turbomill::cpu
