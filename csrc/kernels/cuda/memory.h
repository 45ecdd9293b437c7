// Owners of device memory and of pinned host memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace turbomill::cuda {

struct DeviceFree {
    void operator()(void* data) const;
};
struct PinnedFree {
    void operator()(void* data) const;
};

// 256-byte aligned. Throws CudaError naming `what`, the bytes wanted and free, and `advice`.
class DeviceMemory {
  public:
    DeviceMemory() = default;
    DeviceMemory(size_t bytes, const std::string& what, const std::string& advice);

    template <class T = void>
    T* as() const {
        return static_cast<T*>(data_.get());
    }
    size_t bytes() const { return bytes_; }

  private:
    std::unique_ptr<void, DeviceFree> data_;
    size_t bytes_ = 0;
};

// Likewise, of the host.
class PinnedMemory {
  public:
    explicit PinnedMemory(size_t bytes);

    template <class T = void>
    T* as() const {
        return static_cast<T*>(data_.get());
    }

  private:
    std::unique_ptr<void, PinnedFree> data_;
};

}  // namespace turbomill::cuda
