// Small value types and helpers everything shares.
#pragma once

#include <stdexcept>
#include <string>

#include "core/dtype.h"

namespace turbomill {

// Accepts safetensors' spelling ("F16") and torch's ("float16").
inline DType parse_dtype(const std::string& name) {
    if (name == "F32" || name == "float32") return DType::F32;
    if (name == "F16" || name == "float16") return DType::F16;
    if (name == "BF16" || name == "bfloat16") return DType::BF16;
    if (name == "U8" || name == "uint8") return DType::U8;
    if (name == "I32" || name == "int32") return DType::I32;
    throw std::invalid_argument("dtype '" + name + "' is not one of float32, float16, bfloat16, uint8");
}

constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

}  // namespace turbomill
