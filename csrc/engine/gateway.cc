#include "engine/gateway.h"

#include <stdexcept>
#include <utility>

namespace turbomill {

uint64_t Gateway::submit(Request request) {
    uint64_t id;
    {
        std::lock_guard lock(mutex_);
        if (events_.closed) throw std::runtime_error("the engine is closed");
        id = request.id = next_id_++;
        events_.requests.push_back(std::move(request));
    }
    arrived_.notify_one();
    return id;
}

void Gateway::cancel(uint64_t id) {
    {
        std::lock_guard lock(mutex_);
        events_.cancels.push_back(id);
    }
    arrived_.notify_one();
}

void Gateway::close() {
    {
        std::lock_guard lock(mutex_);
        events_.closed = true;
    }
    arrived_.notify_one();
}

void Gateway::post_result(std::unique_ptr<BatchData> batch) {
    {
        std::lock_guard lock(mutex_);
        events_.results.push_back(std::move(batch));
    }
    arrived_.notify_one();
}

Gateway::Events Gateway::pop(bool wait) {
    std::unique_lock lock(mutex_);
    const auto something = [&] {
        return (events_.closed && !close_seen_) || !events_.requests.empty() || !events_.cancels.empty() ||
               !events_.results.empty();
    };
    if (wait) arrived_.wait(lock, something);
    Events taken = std::move(events_);
    events_ = {};
    events_.closed = close_seen_ = taken.closed;
    return taken;
}

}  // namespace turbomill
