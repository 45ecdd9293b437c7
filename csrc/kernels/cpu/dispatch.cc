#include <stdexcept>
#include <string>

#include "kernels/cpu/int8.h"
#include "kernels/cpu/kernels.h"

namespace turbomill::cpu {

extern const Kernels kernels_baseline;
#if defined(TM_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Int8Kernels int8_vnni;
#endif

int available_isas(const char** names, int capacity) {
    int count = 0;
    const auto add = [&](const char* name) {
        if (count < capacity) names[count] = name;
        ++count;
    };
    add("baseline");
#if defined(TM_X86)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2) add("avx2");
    if (avx512) add("avx512");
#endif
    return count;
}

const Int8Kernels* int8_kernels() {
#if defined(TM_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &int8_vnni;
#endif
    return nullptr;
}

const Kernels& kernels(const char* isa) {
    const char* names[8];
    const int count = available_isas(names, 8);
    std::string wanted = isa;
    if (wanted.empty()) wanted = names[count - 1];
    bool found = false;
    for (int i = 0; i < count; ++i) found |= wanted == names[i];
    if (!found) throw std::invalid_argument("instruction set '" + wanted + "' is not available on this CPU");
#if defined(TM_X86)
    if (wanted == "avx512") return kernels_avx512;
    if (wanted == "avx2") return kernels_avx2;
#endif
    return kernels_baseline;
}

}  // namespace turbomill::cpu
