// The door between client threads and the engine thread: the only object that several threads touch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/batch.h"
#include "engine/request.h"

namespace turbomill {

// What a client asks of the engine as a whole. Carried out, in turn, when no step is in flight.
struct Command {
    bool pause = false;                 // plan no steps from now on, or plan them again
    bool drop_blocks = false;           // give all KV blocks up: what runs is computed again later
    std::function<void()> on_executor;  // then run there; may throw, and then nothing has changed
    std::shared_ptr<std::promise<void>> done;
};

class Gateway {
  public:
    // Everything that arrived since the last pop.
    struct Events {
        std::vector<Request> requests;
        std::vector<uint64_t> cancels;
        std::vector<TokenMask> masks;
        std::vector<Command> commands;
        std::vector<std::unique_ptr<BatchData>> results;  // steps the executor finished, in order
        bool closed = false;

        void clear();
    };

    // Client threads. submit() numbers the request; it throws std::runtime_error once the gateway is closed.
    uint64_t submit(Request request);
    void cancel(uint64_t id);
    void allow(TokenMask mask);
    // Throws std::runtime_error once the gateway is closed.
    void command(Command command);
    void close();
    // Since when something has waited for the engine thread; nothing: it has seen everything.
    std::optional<std::chrono::steady_clock::time_point> waiting_since() const;

    // The executor thread.
    void post_result(std::unique_ptr<BatchData> batch);

    // The engine thread: everything, in place of what `taken` had. With `wait`, blocks until there is
    // something; it only waits when it has nothing to do.
    void pop(bool wait, Events& taken);

  private:
    // Called with the lock held.
    void note_arrival();

    mutable std::mutex mutex_;
    std::condition_variable arrived_;
    Events events_;
    std::optional<std::chrono::steady_clock::time_point> waiting_since_;
    bool close_seen_ = false;  // the engine thread knows; closing wakes it once
    uint64_t next_id_ = 1;
};

}  // namespace turbomill
