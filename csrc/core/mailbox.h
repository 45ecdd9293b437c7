// Values on their way from one thread to another, which takes all that are there at once. Two buffers change
// hands, so that a steady flow allocates nothing unless more than `room` values lie there.
#pragma once

#include <condition_variable>
#include <iterator>
#include <mutex>
#include <vector>

namespace turbomill {

template <class T>
class Mailbox {
  public:
    explicit Mailbox(size_t room) : room_(room) { items_.reserve(room); }

    // Adds `values`, and empties it.
    void put(std::vector<T>& values) {
        {
            std::lock_guard lock(mutex_);
            if (items_.empty())
                items_.swap(values);
            else
                items_.insert(items_.end(), std::make_move_iterator(values.begin()),
                              std::make_move_iterator(values.end()));
        }
        values.clear();
        values.reserve(room_);
        ready_.notify_one();
    }

    // Blocks; `values` becomes everything that was put. False once the mailbox is closed and empty.
    bool take(std::vector<T>& values) {
        values.clear();
        values.reserve(room_);
        std::unique_lock lock(mutex_);
        ready_.wait(lock, [&] { return closed_ || !items_.empty(); });
        items_.swap(values);
        return !values.empty();
    }

    void close() {
        {
            std::lock_guard lock(mutex_);
            closed_ = true;
        }
        ready_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable ready_;
    const size_t room_;
    std::vector<T> items_;
    bool closed_ = false;
};

}  // namespace turbomill
