#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>

#include "core/types.h"

namespace turbomill {

Scheduler::Scheduler(const EngineConfig& config)
    : config_(config), pool_(config.cache_block_count), free_slots_(2 * config.max_batch_size) {
    std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
}

void Scheduler::add(std::unique_ptr<Sequence> sequence) {
    waiting_.push_back(sequence.get());
    ++waiting_live_;
    sequences_.emplace(sequence->id(), std::move(sequence));
}

Sequence* Scheduler::find(uint64_t id) {
    const auto it = sequences_.find(id);
    return it == sequences_.end() ? nullptr : it->second.get();
}

std::vector<Sequence*> Scheduler::all() {
    std::vector<Sequence*> found;
    for (auto& [id, sequence] : sequences_) found.push_back(sequence.get());
    return found;
}

int Scheduler::blocks_needed(const Sequence& sequence, int tokens) const {
    return std::max(0, ceil_div(tokens, config_.block_len) - int(sequence.blocks.size()));
}

std::unique_ptr<BatchData> Scheduler::schedule(int steps_in_flight) {
    plan_.clear();
    free_ = pool_.available();
    prefill_budget_ = config_.max_prefill_token_num;
    short_of_blocks_ = false;
    plan_required(steps_in_flight);
    // Out of blocks while a step still reads some: let it drain, so that the next plan may preempt.
    if (short_of_blocks_ && steps_in_flight > 0) return nullptr;
    if (!short_of_blocks_) plan_admissions();
    return plan_.empty() ? nullptr : commit();
}

// Sequences that hold blocks go first, oldest first. A decode costs one token outside the prefill budget, so
// prompts never starve it.
void Scheduler::plan_required(int steps_in_flight) {
    for (size_t i = 0; i < running_.size(); ++i) {
        Sequence& sequence = *running_[i];
        if (sequence.finished) continue;
        int length = sequence.runnable();
        if (length > 1) {
            length = std::min(length, prefill_budget_);
            prefill_budget_ -= length;
        }
        if (length == 0) continue;
        const int needed = blocks_needed(sequence, sequence.scheduled + length);
        while (needed > free_ && steps_in_flight == 0 && running_.size() > i + 1) {
            // The newest sequence has the least to lose; it starts again when there is room.
            Sequence& victim = *running_.back();
            free_ += int(victim.blocks.size());
            preempt(victim);
        }
        if (needed > free_) {
            short_of_blocks_ = true;
            if (steps_in_flight == 0) preempt(sequence);  // the newest itself: nobody is left to give way
            return;
        }
        free_ -= needed;
        plan_.push_back({&sequence, length, needed});
    }
}

// New prompts, first come first served, while their whole prompt fits and every running sequence keeps a
// spare block.
void Scheduler::plan_admissions() {
    drop_finished_waiting();
    int live = int(std::count_if(running_.begin(), running_.end(), [](Sequence* s) { return !s->finished; }));
    while (!waiting_.empty() && prefill_budget_ > 0 && live < config_.max_batch_size) {
        Sequence& sequence = *waiting_.front();
        // Room for the whole prompt, and for the first token it will give.
        if (blocks_needed(sequence, sequence.length() + sequence.wants_sample()) > free_ - live) break;
        const int length = std::min(sequence.runnable(), prefill_budget_);
        const int needed = blocks_needed(sequence, length);
        prefill_budget_ -= length;
        free_ -= needed;
        sequence.slot = free_slots_.back();
        free_slots_.pop_back();
        plan_.push_back({&sequence, length, needed});
        waiting_.pop_front();
        --waiting_live_;
        ++live;
        // A preempted sequence comes back before younger ones that kept running.
        const auto place = std::upper_bound(running_.begin(), running_.end(), &sequence,
                                            [](Sequence* a, Sequence* b) { return a->id() < b->id(); });
        running_.insert(place, &sequence);
        drop_finished_waiting();
    }
}

std::unique_ptr<BatchData> Scheduler::commit() {
    auto batch = std::make_unique<BatchData>();
    batch->slices.reserve(plan_.size());
    for (const Planned& planned : plan_) {
        Sequence& sequence = *planned.sequence;
        for (int i = 0; i < planned.new_blocks; ++i)
            sequence.blocks.push_back(std::make_shared<LogicalBlock>(pool_));
        batch->slices.push_back(slice_of(sequence, planned.length));
    }
    return batch;
}

Slice Scheduler::slice_of(Sequence& sequence, int length) {
    Slice slice;
    slice.sequence = sequence.id();
    slice.slot = sequence.slot;
    slice.context = sequence.scheduled;
    slice.length = length;
    const int end = slice.context + length;
    if (end <= int(sequence.tokens.size()))
        slice.tokens.assign(sequence.tokens.begin() + slice.context, sequence.tokens.begin() + end);
    slice.blocks.reserve(sequence.blocks.size());
    for (const auto& block : sequence.blocks) slice.blocks.push_back(block->cache_block());
    slice.sample = end == sequence.length() && sequence.wants_sample();
    slice.return_logits = sequence.request.return_logits &&
                          sequence.logits_delivered < sequence.prompt_length() &&
                          slice.context < sequence.prompt_length();
    slice.sampling = sequence.request.sampling;
    sequence.scheduled = end;
    sequence.samples_in_flight += slice.sample;
    ++sequence.steps_in_flight;
    return slice;
}

void Scheduler::preempt(Sequence& sequence) {
    sequence.blocks.clear();
    sequence.scheduled = 0;
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
    waiting_.push_front(&sequence);
    ++waiting_live_;
    ++preemptions_;
}

void Scheduler::note_finished(const Sequence& sequence) {
    if (sequence.slot < 0) --waiting_live_;
}

void Scheduler::drop_finished_waiting() {
    while (!waiting_.empty() && waiting_.front()->finished) {
        sequences_.erase(waiting_.front()->id());
        waiting_.pop_front();
    }
}

void Scheduler::retire() {
    drop_finished_waiting();
    for (size_t i = 0; i < running_.size();) {
        Sequence& sequence = *running_[i];
        if (!sequence.finished || sequence.steps_in_flight > 0) {
            ++i;
            continue;
        }
        free_slots_.push_back(sequence.slot);
        running_.erase(running_.begin() + i);
        sequences_.erase(sequence.id());
    }
}

Sequence* Scheduler::stuck() {
    drop_finished_waiting();
    return running_.empty() && !waiting_.empty() ? waiting_.front() : nullptr;
}

}  // namespace turbomill
