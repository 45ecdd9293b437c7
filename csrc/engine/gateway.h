// The door between client threads and the engine thread: the only object that several threads touch.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/batch.h"
#include "engine/request.h"

namespace turbomill {

class Gateway {
  public:
    // Everything that arrived since the last pop.
    struct Events {
        std::vector<Request> requests;
        std::vector<uint64_t> cancels;
        std::vector<std::unique_ptr<BatchData>> results;  // steps the executor finished, in order
        bool closed = false;
    };

    // Client threads. submit() numbers the request; it throws std::runtime_error once the gateway is closed.
    uint64_t submit(Request request);
    void cancel(uint64_t id);
    void close();

    // The executor thread.
    void post_result(std::unique_ptr<BatchData> batch);

    // The engine thread. With `wait`, blocks until there is something; it only waits when it has nothing to
    // do.
    Events pop(bool wait);

  private:
    std::mutex mutex_;
    std::condition_variable arrived_;
    Events events_;
    bool close_seen_ = false;  // the engine thread knows; closing wakes it once
    uint64_t next_id_ = 1;
};

}  // namespace turbomill
