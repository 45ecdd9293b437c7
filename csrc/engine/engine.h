// The engine: one thread that owns all mutable state, and the threads it talks to through queues.
// Who owns what, and the phases of a step, are in csrc/engine/README.md.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/config.h"
#include "core/queue.h"
#include "engine/executor.h"
#include "engine/gateway.h"
#include "engine/orchestrator.h"
#include "engine/request.h"

namespace turbomill {

class Engine {
  public:
    using OnOutputs = std::function<void(std::vector<Output>)>;

    // `runner` runs steps of the model; `on_outputs` gets a step's outputs, on the signal thread.
    Engine(const ModelConfig& model, const EngineConfig& config, StepRunner runner, OnOutputs on_outputs);
    ~Engine();

    // Any thread. submit() throws std::invalid_argument for a request that can never run.
    uint64_t submit(Request request);
    void cancel(uint64_t id) { gateway_.cancel(id); }
    Metrics metrics() const;
    // Ends running requests as cancelled and joins the threads.
    void close();

  private:
    void run();
    void notify();
    void publish_metrics();

    const ModelConfig model_;
    const EngineConfig config_;
    Gateway gateway_;
    Orchestrator orchestrator_;

    mutable std::mutex metrics_mutex_;
    Metrics published_;

    Queue<std::vector<Output>> signals_;
    OnOutputs on_outputs_;
    std::unique_ptr<ModelExecutor> executor_;
    std::thread signal_thread_;
    std::thread engine_thread_;
    std::once_flag closed_;
};

}  // namespace turbomill
