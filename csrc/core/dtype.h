// Element types. Plain C++ only: the instruction-set specific files include this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomill {

enum class DType : uint8_t { F32, F16, BF16, U8, I32 };

constexpr size_t dtype_bytes(DType dtype) {
    switch (dtype) {
        case DType::F32:
        case DType::I32:
            return 4;
        case DType::F16:
        case DType::BF16:
            return 2;
        case DType::U8:
            return 1;
    }
    return 0;
}

}  // namespace turbomill
