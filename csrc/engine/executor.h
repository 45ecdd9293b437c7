// The thread that runs the model. Steps come in through one queue and go back through another.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "core/queue.h"
#include "engine/batch.h"

namespace turbomill {

class ModelExecutor {
  public:
    using Forward = std::function<void(BatchData&)>;
    using Done = std::function<void(std::unique_ptr<BatchData>)>;

    // `forward` runs a step (on this thread only); `done` takes it back, with `error` set if forward threw.
    ModelExecutor(Forward forward, Done done);
    ~ModelExecutor();

    void push(std::unique_ptr<BatchData> batch) { queue_.push(std::move(batch)); }

  private:
    void run();

    Forward forward_;
    Done done_;
    Queue<std::unique_ptr<BatchData>> queue_;
    std::thread thread_;
};

}  // namespace turbomill
