// The thread that runs the model. Steps come in through one queue and go back through another, in order.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "core/queue.h"
#include "engine/batch.h"

namespace turbomill {

// How the executor runs a step, on its thread only. A device that works on its own lets `issue` return early:
// the next step is then issued behind it, so that it never waits for the host.
struct StepRunner {
    std::function<void(BatchData&)> issue;
    std::function<bool()> ready;     // whether the oldest step that was issued is done
    std::function<void()> complete;  // waits for it and fills its batch
};

class ModelExecutor {
  public:
    using Done = std::function<void(std::unique_ptr<BatchData>)>;

    // `done` takes a step back, with `error` set if it failed.
    ModelExecutor(StepRunner runner, Done done);
    ~ModelExecutor();

    void push(std::unique_ptr<BatchData> batch) { queue_.push({std::move(batch), nullptr}); }
    // Runs `task` on the executor's thread and waits for it; rethrows. No step is in flight.
    void call(const std::function<void()>& task);

  private:
    struct Work {
        std::unique_ptr<BatchData> batch;
        std::function<void()> task;  // when there is no batch
    };

    void run();
    void issue(std::unique_ptr<BatchData> batch);
    void complete_oldest();

    StepRunner runner_;
    Done done_;
    Queue<Work> queue_;
    std::vector<std::unique_ptr<BatchData>> issued_;  // oldest first
    std::thread thread_;
};

}  // namespace turbomill
