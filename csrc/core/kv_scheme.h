// How the KV cache stores its rows. A row is one token's key or value of one head, D elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomill {

// Plain: the cache's dtype. Codes of a row stand beside an fp16 pair (scale, zero) and mean code * scale +
// zero: unsigned integers of 8 or 4 bits, or 8-bit floating-point numbers, whose zero is 0.
enum class KvFormat : uint8_t { Plain, Int8, Int4, E4M3, E5M2 };

constexpr bool is_quantized(KvFormat format) {
    return format != KvFormat::Plain;
}
constexpr int code_bits(KvFormat format) {
    return format == KvFormat::Int4 ? 4 : 8;
}

// What fp8 codes make of a row's greatest magnitude. It is e4m3's largest number; e5m2 would reach further,
// but is no finer there.
constexpr float kFp8Top = 448.f;

// Formats of keys and values. `policy` is EngineConfig::quant_policy.
struct KvFormats {
    KvFormat key, value;

    KvFormat operator[](int value_side) const { return value_side ? value : key; }
    bool quantized() const { return is_quantized(key); }  // both or none
    friend bool operator==(const KvFormats&, const KvFormats&) = default;
};

constexpr bool is_kv_policy(int policy) {
    return policy == 0 || policy == 4 || policy == 8 || policy == 84 || policy == 16 || policy == 17;
}

constexpr KvFormats kv_formats(int policy) {
    switch (policy) {
        case 8:
            return {KvFormat::Int8, KvFormat::Int8};
        case 4:
            return {KvFormat::Int4, KvFormat::Int4};
        case 84:
            return {KvFormat::Int8, KvFormat::Int4};
        case 16:
            return {KvFormat::E4M3, KvFormat::E4M3};
        case 17:
            return {KvFormat::E5M2, KvFormat::E5M2};
        default:
            return {KvFormat::Plain, KvFormat::Plain};
    }
}

// Rows are rotated in blocks of this size: the largest power of two that divides D.
constexpr int rotation_block(int head_dim) {
    return head_dim & -head_dim;
}

}  // namespace turbomill
