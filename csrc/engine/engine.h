// The engine: one thread that owns all mutable state, and the threads it talks to through queues.
// Who owns what, and the phases of a step, are in csrc/engine/README.md.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/config.h"
#include "core/mailbox.h"
#include "engine/executor.h"
#include "engine/gateway.h"
#include "engine/orchestrator.h"
#include "engine/request.h"

namespace turbomill {

class Engine {
  public:
    using OnOutputs = std::function<void(std::vector<Output>&)>;

    // `runner` runs steps of the model; `on_outputs` gets outputs, of one step or of several in order, on the
    // signal thread; it may keep what it likes of them.
    Engine(const ModelConfig& model, const EngineConfig& config, StepRunner runner, OnOutputs on_outputs);
    ~Engine();

    // Any thread. submit() throws std::invalid_argument for a request that can never run.
    uint64_t submit(Request request);
    void cancel(uint64_t id) { gateway_.cancel(id); }
    // Tells a guided request which tokens may follow the `position` that were generated: allowed [ceil(V /
    // 32)] holds a bit for each token, and is empty when none may and the text ends. For a request that has
    // ended it does nothing. Throws std::invalid_argument for another number of words.
    void allow(uint64_t id, int position, std::vector<uint32_t> allowed);
    Metrics metrics() const;
    // Plans no more steps; returns when none is in flight. Requests are taken in and wait.
    void pause() { command({true, false, nullptr, nullptr}); }
    void resume() { command({false, false, nullptr, nullptr}); }
    // Pauses and gives all KV blocks up; then `release` runs on the executor's thread. What ran goes on after
    // wake(), whose `restore` runs there first. Both wait, and rethrow.
    void sleep(std::function<void()> release) { command({true, true, std::move(release), nullptr}); }
    // With `stay_paused`, only the memory is there again.
    void wake(std::function<void()> restore, bool stay_paused = false) {
        command({stay_paused, false, std::move(restore), nullptr});
    }
    // Whether commands left it so.
    bool paused() const { return metrics().paused; }
    // Ends running requests as cancelled and joins the threads.
    void close();

  private:
    void run();
    void command(Command command);
    // Carries commands out if no step is in flight. Returns whether steps may be planned.
    bool obey();
    void note_progress();
    void notify();
    void publish_metrics();

    const ModelConfig model_;
    const EngineConfig config_;
    Gateway gateway_;
    Orchestrator orchestrator_;
    std::deque<Command> commands_;  // not carried out yet
    bool paused_ = false;

    mutable std::mutex metrics_mutex_;
    Metrics published_;
    std::chrono::steady_clock::time_point last_progress_;  // a step ended, or the first one began

    Mailbox<Output> signals_;
    OnOutputs on_outputs_;
    std::unique_ptr<ModelExecutor> executor_;
    std::thread signal_thread_;
    std::thread engine_thread_;
    std::once_flag closed_;
};

}  // namespace turbomill
