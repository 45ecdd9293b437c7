// Decides what each step computes. It plans against the pool's numbers, then commits the plan.
#pragma once

#include <memory>
#include <set>
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
    // Takes a step back whose results have been taken in, for a later one.
    void recycle(std::unique_ptr<BatchData> step);

    // Tokens of `sequence` have arrived: other sequences can find the blocks that they complete.
    void record_arrived(Sequence& sequence);
    // The step failed: what it was to write is never found. Returns the sequences that must fail with it:
    // its own, and those that have taken something of theirs.
    std::vector<Sequence*> spoil(const BatchData& batch);
    // Nobody finds what this sequence computed: it may be wrong.
    void distrust(const Sequence& sequence);
    // Drops finished sequences that no step reads any more.
    void retire();

    int waiting() const { return int(waiting_.size()); }
    int running() const { return int(running_.size()); }
    const std::vector<Sequence*>& running_sequences() const { return running_; }
    int64_t preemptions() const { return preemptions_; }
    const BlockPool& pool() const { return pool_; }
    // Preempts what runs and forgets what is cached: every block is free. No step is in flight.
    void drop_blocks();

    // The engine calls this when it sets `finished`: a sequence that waits leaves at once.
    void note_finished(Sequence& sequence);
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
    void admit_waiting(BatchData& batch);
    void admit(Sequence& sequence, const PrefixMatch& match, BatchData& batch);
    void commit(Sequence& sequence, int length, int new_blocks, BatchData& batch);
    void fill(Slice& slice, Sequence& sequence, int length);
    void preempt(Sequence& sequence);
    void leave(Sequence& sequence);
    void record(Sequence& sequence, int end, int64_t step);
    int blocks_needed(const Sequence& sequence, int tokens) const;

    const EngineConfig& config_;
    std::unordered_map<uint64_t, std::unique_ptr<Sequence>> sequences_;
    BlockPool pool_;
    std::set<Sequence*, ByUrgency> waiting_;
    std::vector<Sequence*> running_;  // by urgency
    std::vector<int> free_slots_;
    std::vector<std::unique_ptr<Sequence>> gone_;    // finished while they waited; freed by retire()
    std::vector<std::unique_ptr<BatchData>> spare_;  // empty steps
    int64_t preemptions_ = 0;

    // The plan being made.
    int64_t step_ = 0;  // its number
    std::vector<Planned> plan_;
    int reserved_ = 0;        // blocks it will take
    int prefill_budget_ = 0;  // tokens
    bool short_of_blocks_ = false;
};

}  // namespace turbomill
