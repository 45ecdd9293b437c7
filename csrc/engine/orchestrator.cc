#include "engine/orchestrator.h"

#include <algorithm>
#include <utility>

namespace turbomill {

void Orchestrator::accept(Request request) {
    counters_.prompt_tokens += int64_t(request.token_ids.size());
    auto sequence = std::make_unique<Sequence>(std::move(request));
    const Request& r = sequence->request;
    if (r.guided || r.rules.any(r.stop_token_ids))
        sequence->rules = std::make_unique<LogitRules>(r.rules, r.stop_token_ids, model_.vocab_size);
    scheduler_.add(std::move(sequence));
}

Output Orchestrator::output_of(const Sequence& sequence) {
    Output output;
    output.id = sequence.id();
    output.cached_tokens = std::max(0, sequence.cached_tokens);
    return output;
}

void Orchestrator::cancel(uint64_t id) {
    Sequence* sequence = scheduler_.find(id);
    if (!sequence || sequence->finished) return;
    Output output = output_of(*sequence);
    finish(*sequence, Finish::Cancelled, output);
}

void Orchestrator::cancel_all() {
    for (Sequence* sequence : scheduler_.all()) cancel(sequence->id());
}

void Orchestrator::allow(const TokenMask& mask) {
    Sequence* sequence = scheduler_.find(mask.id);
    if (!sequence || sequence->finished) return;
    if (!sequence->request.guided || sequence->samples_in_flight > 0 ||
        mask.position != sequence->generated()) {
        fail(*sequence, "a token mask that the request does not wait for");
    } else if (!mask.allowed) {
        Output output = output_of(*sequence);
        finish(*sequence, Finish::Stop, output);
    } else {
        sequence->rules->allow(mask.allowed);
        sequence->allowed_at = mask.position;
    }
}

std::unique_ptr<BatchData> Orchestrator::plan() {
    while (true) {
        if (auto batch = scheduler_.schedule(in_flight_)) {
            ++in_flight_;
            ++counters_.steps;
            return batch;
        }
        Sequence* stuck = in_flight_ == 0 ? scheduler_.stuck() : nullptr;
        if (!stuck) return nullptr;
        fail(*stuck, "the request does not fit the KV cache");
    }
}

void Orchestrator::take_in(std::unique_ptr<BatchData> step) {
    const BatchData& batch = *step;
    --in_flight_;
    counters_.recorded_steps += batch.recorded;
    if (!batch.error.empty()) {
        counters_.healthy = false;
        for (Sequence* sequence : scheduler_.spoil(batch)) fail(*sequence, batch.error);
    }
    for (size_t i = 0; i < batch.slices.size(); ++i) {
        const Slice& slice = batch.slices[i];
        Sequence& sequence = *scheduler_.find(slice.sequence);  // kept while a step reads it
        --sequence.steps_in_flight;
        sequence.samples_in_flight -= slice.sample;
        if (!sequence.finished) take_result(sequence, slice, batch, i);
    }
    scheduler_.recycle(std::move(step));
}

void Orchestrator::take_result(Sequence& sequence, const Slice& slice, const BatchData& batch, size_t index) {
    if (slice.sample && !batch.samples[index].finite) {
        fail(sequence, "the model's logits are not finite");
        return;
    }
    Output output = output_of(sequence);
    if (slice.return_logits || !slice.targets.empty()) take_rows(sequence, slice, batch, index, output);
    if (slice.sample) {
        if (slice.sampling.logprobs >= 0) output.logprobs.push_back(batch.samples[index].logprobs);
        take_token(sequence, batch.samples[index].token, output);
    } else if (sequence.request.max_new_tokens == 0 &&
               slice.context + slice.length == sequence.prompt_length()) {
        finish(sequence, Finish::Length, output);
    } else if (output.logits_rows > 0 || !output.prompt_logprobs.empty()) {
        outputs_.push_back(std::move(output));
    }
}

void Orchestrator::take_rows(Sequence& sequence, const Slice& slice, const BatchData& batch, size_t index,
                             Output& output) {
    // A recomputed prompt repeats positions that were already delivered, and may run past the prompt.
    const int begin = std::max(slice.context, sequence.rows_delivered);
    const int end = std::min(slice.context + slice.length, sequence.prompt_length());
    if (end <= begin) return;
    if (slice.return_logits) {
        const auto first = batch.logits[index].begin() + int64_t(begin - slice.context) * model_.vocab_size;
        output.logits =
            std::make_shared<std::vector<float>>(first, first + int64_t(end - begin) * model_.vocab_size);
        output.logits_rows = end - begin;
    }
    for (int at = begin; !slice.targets.empty() && at < std::min(end, sequence.prompt_length() - 1); ++at)
        output.prompt_logprobs.push_back(batch.logprobs[index][at - slice.context]);
    sequence.rows_delivered = end;
}

void Orchestrator::take_token(Sequence& sequence, int token, Output& output) {
    const auto& stops = sequence.request.stop_token_ids;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
        output.logprobs.clear();  // one for each token that is delivered
        finish(sequence, Finish::Stop, output);
        return;
    }
    sequence.tokens.push_back(token);
    scheduler_.record_arrived(sequence);
    ++counters_.generated_tokens;
    output.token = token;
    if (sequence.generated() >= sequence.request.max_new_tokens) {
        finish(sequence, Finish::Length, output);
    } else {
        outputs_.push_back(std::move(output));
    }
}

void Orchestrator::finish(Sequence& sequence, Finish reason, Output& output) {
    counters_.cached_tokens += std::max(0, sequence.cached_tokens);
    sequence.finished = true;
    output.finish = reason;
    outputs_.push_back(std::move(output));
    scheduler_.note_finished(sequence);
}

void Orchestrator::fail(Sequence& sequence, const std::string& error) {
    scheduler_.distrust(sequence);
    Output output = output_of(sequence);
    output.error = error;
    finish(sequence, Finish::Error, output);
}

Metrics Orchestrator::metrics() const {
    Metrics now = counters_;
    now.waiting = scheduler_.waiting();
    now.steps_in_flight = in_flight_;
    now.running = scheduler_.running();
    now.total_blocks = scheduler_.pool().total();
    now.free_blocks = scheduler_.pool().free();
    now.cached_blocks = scheduler_.pool().cached();
    now.preemptions = scheduler_.preemptions();
    now.evictions = scheduler_.pool().evictions();
    return now;
}

}  // namespace turbomill
