// Arrays in device memory for the bindings of single kernels.
#pragma once

#include <pybind11/numpy.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/half.h"
#include "core/types.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/fused_plan.h"
#include "kernels/cuda/memory.h"

namespace turbomill::python {

using Floats = pybind11::array_t<float, pybind11::array::c_style | pybind11::array::forcecast>;
using Bytes = pybind11::array_t<uint8_t, pybind11::array::c_style>;
using Bits16 = pybind11::array_t<uint16_t, pybind11::array::c_style>;

inline void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

// (warpgroups, tokens, blocks, splits) of a plan, as Python passes it.
using PlanTuple = std::array<int, 4>;
inline cuda::FusedPlan plan_of(const PlanTuple& p) {
    return {{p[0], p[1], p[2]}, p[3]};
}

// Of the current device.
inline int multiprocessors() {
    int device = 0, count = 0;
    cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
                "counting multiprocessors");
    return count;
}

class DeviceArray {
  public:
    // `count` elements of `type`, poisoned with bits that are NaN in every type.
    DeviceArray(DType type, size_t count)
        : type_(type),
          count_(count),
          memory_(count * dtype_bytes(type), "a test array", "use a smaller case") {
        if (count) cuda::check(cudaMemset(memory_.as(), 0xff, memory_.bytes()), "poison");
    }
    DeviceArray(const float* values, size_t count, DType type) : DeviceArray(type, count) {
        if (type == DType::F32) {
            write(values);
            return;
        }
        std::vector<uint16_t> bits(count);
        for (size_t i = 0; i < count; ++i)
            bits[i] = type == DType::F16 ? float_to_f16(values[i]) : float_to_bf16(values[i]);
        write(bits.data());
    }
    DeviceArray(const Floats& values, DType type) : DeviceArray(values.data(), size_t(values.size()), type) {}
    DeviceArray(const void* bytes, size_t count) : DeviceArray(DType::U8, count) { write(bytes); }

    template <class T>
    T* as() const {
        return memory_.as<T>();
    }

    void read_bytes(uint8_t* out) const {
        cuda::check(cudaMemcpy(out, memory_.as(), memory_.bytes(), cudaMemcpyDeviceToHost),
                    "reading a result");
    }

    // As fp32.
    void read(float* out) const {
        std::vector<uint8_t> bytes(memory_.bytes());
        read_bytes(bytes.data());
        if (type_ == DType::F32) {
            std::memcpy(out, bytes.data(), bytes.size());
            return;
        }
        for (size_t i = 0; i < count_; ++i) {
            uint16_t bits;
            std::memcpy(&bits, bytes.data() + 2 * i, 2);
            out[i] = type_ == DType::F16 ? f16_to_float(bits) : bf16_to_float(bits);
        }
    }
    Floats array(std::vector<pybind11::ssize_t> shape) const {
        Floats out(std::move(shape));
        read(out.mutable_data());
        return out;
    }

  private:
    void write(const void* bytes) {
        if (count_)
            cuda::check(cudaMemcpy(memory_.as(), bytes, memory_.bytes(), cudaMemcpyHostToDevice), "writing");
    }

    DType type_;
    size_t count_;
    cuda::DeviceMemory memory_;
};

}  // namespace turbomill::python
