// Decides what each step computes. It plans against the pool's numbers, then commits the plan.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/config.h"
#include "engine/blocks.h"
#include "engine/sequence.h"

namespace turbomill {

class Scheduler {
  public:
    explicit Scheduler(const EngineConfig& config);

    void add(std::unique_ptr<Sequence> sequence);
    // Null when unknown (finished and gone).
    Sequence* find(uint64_t id);

    // The next step, or null when nothing can run now. Sequences are preempted only while no step is in
    // flight, so that no kernel still reads the blocks they give up.
    std::unique_ptr<BatchData> schedule(int steps_in_flight);

    // Drops finished sequences that no step reads any more.
    void retire();

    int waiting() const { return waiting_live_; }
    int running() const { return int(running_.size()); }
    int64_t preemptions() const { return preemptions_; }
    const CacheBlockPool& pool() const { return pool_; }

    // The engine calls this when it sets `finished`, so that the counts stay right.
    void note_finished(const Sequence& sequence);
    // A sequence that cannot start although nothing else runs; the engine fails it.
    Sequence* stuck();
    std::vector<Sequence*> all();

  private:
    struct Planned {
        Sequence* sequence;
        int length;
        int new_blocks;
    };

    void plan_required(int steps_in_flight);
    void plan_admissions();
    std::unique_ptr<BatchData> commit();
    Slice slice_of(Sequence& sequence, int length);
    void preempt(Sequence& sequence);
    int blocks_needed(const Sequence& sequence, int tokens) const;
    void drop_finished_waiting();

    const EngineConfig& config_;
    CacheBlockPool pool_;  // outlives the sequences' blocks
    std::unordered_map<uint64_t, std::unique_ptr<Sequence>> sequences_;
    std::deque<Sequence*> waiting_;   // by arrival; may hold finished ones until they reach the front
    std::vector<Sequence*> running_;  // by arrival
    std::vector<int> free_slots_;
    int waiting_live_ = 0;
    int64_t preemptions_ = 0;

    // The plan being made.
    std::vector<Planned> plan_;
    int free_ = 0;            // blocks the plan has not used
    int prefill_budget_ = 0;  // tokens
    bool short_of_blocks_ = false;
};

}  // namespace turbomill
