// What the engine decides, apart from threads: it takes requests in, plans steps, and turns their results
// into outputs. The engine thread owns it; tests drive it step by step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/config.h"
#include "engine/request.h"
#include "engine/scheduler.h"

namespace turbomill {

class Orchestrator {
  public:
    Orchestrator(const ModelConfig& model, const EngineConfig& config) : model_(model), scheduler_(config) {}

    void accept(Request request);
    void cancel(uint64_t id);
    void cancel_all();
    void allow(const TokenMask& mask);
    // The next step, or null when nothing can run before another step ends or a request comes.
    std::unique_ptr<BatchData> plan();
    // A step that plan() gave, with its results. Steps come back in order.
    void take_in(std::unique_ptr<BatchData> step);
    // See Scheduler::drop_blocks.
    void drop_blocks() { scheduler_.drop_blocks(); }
    // Frees what finished sequences hold, as far as no step in flight reads it.
    void retire() { scheduler_.retire(); }
    // What clients are to be told, in order. Whoever tells them empties it.
    std::vector<Output>& outputs() { return outputs_; }

    int steps_in_flight() const { return in_flight_; }
    bool idle() const { return in_flight_ == 0 && scheduler_.waiting() == 0 && scheduler_.running() == 0; }
    Metrics metrics() const;
    const Scheduler& scheduler() const { return scheduler_; }

  private:
    void take_result(Sequence& sequence, const Slice& slice, const BatchData& batch, size_t index);
    void take_rows(Sequence& sequence, const Slice& slice, const BatchData& batch, size_t index,
                   Output& output);
    void take_token(Sequence& sequence, int token, Output& output);
    void finish(Sequence& sequence, Finish reason, Output& output);
    void fail(Sequence& sequence, const std::string& error);
    static Output output_of(const Sequence& sequence);

    const ModelConfig& model_;
    Scheduler scheduler_;
    std::vector<Output> outputs_;
    int in_flight_ = 0;
    Metrics counters_;
};

}  // namespace turbomill
