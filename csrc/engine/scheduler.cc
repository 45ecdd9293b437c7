#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>

#include "core/types.h"

namespace turbomill {
namespace {

// Waiting sequences that one plan passes over because what they begin with is being computed.
constexpr int kMostPassedOver = 32;

}  // namespace

Scheduler::Scheduler(const EngineConfig& config)
    : config_(config),
      pool_(config.cache_block_count, config.block_len, config.enable_prefix_caching),
      free_slots_(2 * config.max_batch_size) {
    std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
}

void Scheduler::add(std::unique_ptr<Sequence> sequence) {
    waiting_.insert(sequence.get());
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

Sequence* Scheduler::stuck() {
    if (!running_.empty()) return nullptr;
    const auto it = std::find_if(waiting_.begin(), waiting_.end(), [](Sequence* s) { return s->ready(); });
    return it == waiting_.end() ? nullptr : *it;
}

int Scheduler::blocks_needed(const Sequence& sequence, int tokens) const {
    return std::max(0, ceil_div(tokens, config_.block_len) - int(sequence.blocks.size()));
}

std::unique_ptr<BatchData> Scheduler::schedule(int steps_in_flight) {
    plan_.clear();
    reserved_ = 0;
    prefill_budget_ = config_.max_prefill_token_num;
    short_of_blocks_ = false;
    plan_required(steps_in_flight);
    // Out of blocks while a step still reads some: let it drain, so that the next plan may preempt.
    if (short_of_blocks_ && steps_in_flight > 0) return nullptr;
    if (spare_.empty()) spare_.push_back(std::make_unique<BatchData>());
    auto batch = std::move(spare_.back());
    spare_.pop_back();
    batch->step = step_;
    for (const Planned& planned : plan_)
        commit(*planned.sequence, planned.length, planned.new_blocks, *batch);
    if (!short_of_blocks_) admit_waiting(*batch);
    if (batch->slices.empty()) {
        spare_.push_back(std::move(batch));
        return nullptr;
    }
    ++step_;
    return batch;
}

void Scheduler::recycle(std::unique_ptr<BatchData> step) {
    step->clear();
    spare_.push_back(std::move(step));
}

// Sequences that hold blocks go first, the most urgent first. A decode costs one token outside the prefill
// budget, so prompts never starve it.
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
        while (needed > pool_.available() - reserved_ && steps_in_flight == 0 && running_.size() > i + 1) {
            // The last in line gives way. What it computed stays cached for as long as the blocks are not
            // needed, its end goes first: it loses no more than what the others take.
            preempt(*running_.back());
        }
        if (needed > pool_.available() - reserved_) {
            short_of_blocks_ = true;
            if (steps_in_flight == 0) preempt(sequence);  // the last itself: nobody is left to give way
            return;
        }
        reserved_ += needed;
        plan_.push_back({&sequence, length, needed});
    }
}

// New prompts in turn, while their whole prompt fits and every running sequence keeps a spare block. One
// whose beginning another sequence is computing waits for it, and lets others pass.
void Scheduler::admit_waiting(BatchData& batch) {
    int live = int(std::count_if(running_.begin(), running_.end(), [](Sequence* s) { return !s->finished; }));
    int passed_over = 0;
    for (auto it = waiting_.begin(); it != waiting_.end();) {
        if (prefill_budget_ <= 0 || live >= config_.max_batch_size || free_slots_.empty()) return;
        Sequence& sequence = **it;
        if (!sequence.ready()) {  // few: new requests' masks come with them, the others have been preempted
            ++it;
            continue;
        }
        PrefixMatch match;
        if (config_.enable_prefix_caching) {
            match = pool_.match(sequence.tokens, sequence.reusable(), step_);
            if (match.promised >= pool_.least_rows()) {
                if (++passed_over > kMostPassedOver) return;
                ++it;
                continue;
            }
        }
        // Room for the whole prompt, and for the first token it will give.
        const int whole = blocks_needed(sequence, sequence.length() + sequence.wants_sample());
        const int idle = int(std::count_if(match.blocks.begin(), match.blocks.end(),
                                           [](const LogicalBlock* block) { return block->users == 0; }));
        if (whole - int(match.blocks.size()) + idle > pool_.available() - live) return;
        it = waiting_.erase(it);
        admit(sequence, match, batch);
        ++live;
    }
}

void Scheduler::admit(Sequence& sequence, const PrefixMatch& match, BatchData& batch) {
    sequence.slot = free_slots_.back();
    free_slots_.pop_back();
    // A preempted sequence comes back before later ones that kept running.
    running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, ByUrgency()), &sequence);
    for (LogicalBlock* block : match.blocks) pool_.share(*block);
    // All that it may come to, so that its decodes need not ask for memory.
    const int most = sequence.prompt_length() + sequence.request.max_new_tokens;
    sequence.tokens.reserve(most);
    sequence.blocks.reserve(ceil_div(most, config_.block_len));
    sequence.blocks.assign(match.blocks.begin(), match.blocks.end());
    const int shared = int(match.blocks.size()) * config_.block_len;
    const int found = shared + match.rows;
    if (found > 0) sequence.reused_at = step_;
    if (sequence.cached_tokens < 0) sequence.cached_tokens = found;
    sequence.scheduled = sequence.recorded = shared;
    if (match.rows > 0) {
        // The page as it is now: acquire() may evict the block, even hand out its own page.
        const int source = match.partial->page;
        sequence.blocks.push_back(pool_.acquire(sequence));
        const int target = sequence.blocks.back()->page;
        if (source != target) batch.copies.push_back({source, target});
        sequence.scheduled = found;
        record(sequence, found, step_);
    }
    const int length = std::min(sequence.runnable(), prefill_budget_);
    prefill_budget_ -= length;
    commit(sequence, length, blocks_needed(sequence, sequence.scheduled + length), batch);
}

void Scheduler::commit(Sequence& sequence, int length, int new_blocks, BatchData& batch) {
    for (int i = 0; i < new_blocks; ++i) sequence.blocks.push_back(pool_.acquire(sequence));
    const bool prompt = sequence.scheduled < sequence.prompt_length() || length > 1;
    fill(batch.add_slice(), sequence, length);
    if (prompt) record(sequence, std::min(sequence.scheduled, int(sequence.tokens.size())), step_);
}

void Scheduler::fill(Slice& slice, Sequence& sequence, int length) {
    slice.sequence = sequence.id();
    slice.slot = sequence.slot;
    slice.context = sequence.scheduled;
    slice.length = length;
    const int end = slice.context + length;
    if (end <= int(sequence.tokens.size()))
        slice.tokens.assign(sequence.tokens.begin() + slice.context, sequence.tokens.begin() + end);
    slice.blocks.reserve(sequence.blocks.capacity());
    for (const LogicalBlock* block : sequence.blocks) slice.blocks.push_back(block->page);
    slice.sample = end == sequence.length() && sequence.wants_sample();
    if (sequence.owes_rows() && slice.context < sequence.prompt_length()) {
        slice.return_logits = sequence.request.return_logits;
        if (sequence.request.sampling.prompt_logprobs >= 0)
            for (int at = slice.context + 1; at <= end; ++at)
                slice.targets.push_back(at < sequence.prompt_length() ? sequence.tokens[at] : -1);
    }
    slice.sampling = sequence.request.sampling;
    if (slice.sample && sequence.rules)
        slice.edits =
            sequence.rules->edits(sequence.tokens, sequence.prompt_length(), sequence.samples_in_flight);
    sequence.scheduled = end;
    sequence.samples_in_flight += slice.sample;
    ++sequence.steps_in_flight;
}

void Scheduler::record(Sequence& sequence, int end, int64_t step) {
    while (sequence.recorded < end) {
        const int index = sequence.recorded / config_.block_len;
        const int upto = std::min(end, (index + 1) * config_.block_len);
        pool_.record(*sequence.blocks[index], index ? sequence.blocks[index - 1] : nullptr,
                     sequence.tokens.data() + sequence.recorded, sequence.tokens.data() + upto, step);
        sequence.recorded = upto;
    }
}

void Scheduler::record_arrived(Sequence& sequence) {
    const int known = std::min(sequence.scheduled, int(sequence.tokens.size()));
    record(sequence, known / config_.block_len * config_.block_len, step_ - 1);
}

std::vector<Sequence*> Scheduler::spoil(const BatchData& batch) {
    for (const Slice& slice : batch.slices) {
        Sequence& sequence = *find(slice.sequence);
        const int last = (slice.context + slice.length - 1) / config_.block_len;
        for (int i = slice.context / config_.block_len; i <= last; ++i) pool_.spoil(*sequence.blocks[i]);
    }
    std::vector<Sequence*> failed;
    for (Sequence* sequence : running_) {
        // The next step was planned before this one's end was known: what it took over may be this one's.
        const bool touched = sequence->reused_at == batch.step + 1 ||
                             std::any_of(sequence->blocks.begin(), sequence->blocks.end(),
                                         [](const LogicalBlock* block) { return block->spoiled; });
        if (!touched) continue;
        distrust(*sequence);
        if (!sequence->finished) failed.push_back(sequence);
    }
    return failed;
}

void Scheduler::distrust(const Sequence& sequence) {
    for (LogicalBlock* block : sequence.blocks)
        if (block->writer == &sequence) pool_.spoil(*block);
}

// Gives blocks and slot back; what is known of the blocks stays cached.
void Scheduler::leave(Sequence& sequence) {
    record(sequence, std::min(sequence.scheduled, int(sequence.tokens.size())), step_ - 1);
    pool_.release(sequence.blocks, sequence);
    sequence.blocks.clear();
    sequence.scheduled = sequence.recorded = 0;
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
}

void Scheduler::preempt(Sequence& sequence) {
    leave(sequence);
    waiting_.insert(&sequence);
    ++preemptions_;
}

void Scheduler::drop_blocks() {
    while (!running_.empty()) preempt(*running_.back());
    pool_.clear();
}

void Scheduler::note_finished(Sequence& sequence) {
    if (sequence.slot >= 0) return;
    waiting_.erase(&sequence);
    const auto it = sequences_.find(sequence.id());
    gone_.push_back(std::move(it->second));
    sequences_.erase(it);
}

void Scheduler::retire() {
    gone_.clear();
    for (size_t i = 0; i < running_.size();) {
        Sequence& sequence = *running_[i];
        if (!sequence.finished || sequence.steps_in_flight > 0) {
            ++i;
            continue;
        }
        leave(sequence);
        sequences_.erase(sequence.id());
    }
}

}  // namespace turbomill
