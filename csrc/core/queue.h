// A queue of a few items between one or more producers and one consumer. Items move up when one is taken, so
// that a steady flow allocates nothing.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace turbomill {

template <class T>
class Queue {
  public:
    void push(T value) {
        {
            std::lock_guard lock(mutex_);
            items_.push_back(std::move(value));
        }
        ready_.notify_one();
    }

    // Blocks; returns nothing once the queue is closed and empty.
    std::optional<T> pop() {
        std::unique_lock lock(mutex_);
        ready_.wait(lock, [&] { return closed_ || !items_.empty(); });
        return take();
    }

    // Waits up to `patience` for something to take.
    template <class Duration>
    std::optional<T> pop_within(Duration patience) {
        std::unique_lock lock(mutex_);
        ready_.wait_for(lock, patience, [&] { return closed_ || !items_.empty(); });
        return take();
    }

    void close() {
        {
            std::lock_guard lock(mutex_);
            closed_ = true;
        }
        ready_.notify_all();
    }

  private:
    // The lock is held.
    std::optional<T> take() {
        if (items_.empty()) return std::nullopt;
        std::optional<T> value(std::move(items_.front()));
        items_.erase(items_.begin());
        return value;
    }

    std::mutex mutex_;
    std::condition_variable ready_;
    std::vector<T> items_;
    bool closed_ = false;
};

}  // namespace turbomill
