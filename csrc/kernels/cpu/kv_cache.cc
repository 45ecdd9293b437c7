#include "kernels/cpu/kv_cache.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace turbomill::cpu {
namespace {

uint8_t* reserve(size_t bytes) {
    void* data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        throw std::runtime_error("the KV cache needs " + std::to_string(bytes) +
                                 " bytes: " + std::strerror(errno) + "; lower cache_max_entry_count");
    return static_cast<uint8_t*>(data);
}

}  // namespace

void KvCache::Unmap::operator()(uint8_t* data) const {
    munmap(data, bytes);
}

KvCache::KvCache(const ModelConfig& model, const EngineConfig& config)
    : layout(model, config),
      data_(reserve(layout.block_bytes * config.cache_block_count),
            {layout.block_bytes * config.cache_block_count}) {}

uint8_t* KvCache::rows(int block, int layer, int value, int head) const {
    const LayerLayout& l = layout.layers[layer];
    return data_.get() + block * layout.block_bytes + l.offset + l.rows_at(value, head, layout.heads);
}

uint16_t* KvCache::params(int block, int layer, int value, int head) const {
    const LayerLayout& l = layout.layers[layer];
    return reinterpret_cast<uint16_t*>(data_.get() + block * layout.block_bytes + l.offset +
                                       l.params_at(value, head, layout.heads));
}

void KvCache::write(const Kernels& k, int block, int layer, int value, int head, int place,
                    const float* x) const {
    const LayerLayout& l = layout.layers[layer];
    uint8_t* row = rows(block, layer, value, head) + place * l.row_bytes[value];
    if (l.formats.quantized()) {
        k.kv_quantize(l.formats[value], x, layout.head_dim, row,
                      params(block, layer, value, head) + 2 * place);
    } else {
        k.from_float(layout.dtype, x, row, layout.head_dim);
    }
}

void KvCache::drop() const {
    madvise(data_.get(), data_.get_deleter().bytes, MADV_DONTNEED);
}

void KvCache::copy(const std::vector<BlockCopy>& copies) const {
    for (const BlockCopy& copy : copies)
        std::memcpy(data_.get() + copy.to * layout.block_bytes, data_.get() + copy.from * layout.block_bytes,
                    layout.block_bytes);
}

}  // namespace turbomill::cpu
