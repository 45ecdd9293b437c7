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
        note_arrival();
    }
    arrived_.notify_one();
    return id;
}

void Gateway::cancel(uint64_t id) {
    {
        std::lock_guard lock(mutex_);
        events_.cancels.push_back(id);
        note_arrival();
    }
    arrived_.notify_one();
}

void Gateway::allow(TokenMask mask) {
    {
        std::lock_guard lock(mutex_);
        events_.masks.push_back(std::move(mask));
        note_arrival();
    }
    arrived_.notify_one();
}

void Gateway::command(Command command) {
    {
        std::lock_guard lock(mutex_);
        if (events_.closed) throw std::runtime_error("the engine is closed");
        events_.commands.push_back(std::move(command));
        note_arrival();
    }
    arrived_.notify_one();
}

void Gateway::note_arrival() {
    if (!waiting_since_) waiting_since_ = std::chrono::steady_clock::now();
}

std::optional<std::chrono::steady_clock::time_point> Gateway::waiting_since() const {
    std::lock_guard lock(mutex_);
    return waiting_since_;
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
        note_arrival();
    }
    arrived_.notify_one();
}

void Gateway::Events::clear() {
    requests.clear();
    cancels.clear();
    masks.clear();
    commands.clear();
    results.clear();
    closed = false;
}

void Gateway::pop(bool wait, Events& taken) {
    taken.clear();
    std::unique_lock lock(mutex_);
    const auto something = [&] {
        return (events_.closed && !close_seen_) || !events_.requests.empty() || !events_.cancels.empty() ||
               !events_.masks.empty() || !events_.results.empty() || !events_.commands.empty();
    };
    if (wait) arrived_.wait(lock, something);
    std::swap(taken, events_);
    waiting_since_.reset();
    events_.closed = close_seen_ = taken.closed;
}

}  // namespace turbomill
