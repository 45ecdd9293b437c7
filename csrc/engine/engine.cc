#include "engine/engine.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/types.h"

namespace turbomill {
namespace {

// One step runs while the next is planned and queued behind it.
constexpr int kStepsInFlight = 2;

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

}  // namespace

Engine::Engine(const ModelConfig& model, const EngineConfig& config, StepRunner runner, OnOutputs on_outputs)
    : model_(model), config_(config), scheduler_(config_), on_outputs_(std::move(on_outputs)) {
    executor_ = std::make_unique<ModelExecutor>(std::move(runner), [this](std::unique_ptr<BatchData> batch) {
        gateway_.post_result(std::move(batch));
    });
    publish_metrics();
    signal_thread_ = std::thread([this] {
        while (auto outputs = signals_.pop()) on_outputs_(std::move(*outputs));
    });
    engine_thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
    close();
}

void Engine::close() {
    std::call_once(closed_, [this] {
        gateway_.close();
        engine_thread_.join();
        executor_.reset();
        signals_.close();
        signal_thread_.join();
    });
}

uint64_t Engine::submit(Request request) {
    const int prompt = int(request.token_ids.size());
    require(prompt > 0, "the prompt is empty");
    for (const int token : request.token_ids)
        require(token >= 0 && token < model_.vocab_size, "token id " + std::to_string(token) +
                                                             " is outside the vocabulary of " +
                                                             std::to_string(model_.vocab_size));
    require(request.max_new_tokens >= 0, "max_new_tokens must not be negative");
    require(request.sampling.temperature >= 0.f, "temperature must not be negative");
    require(request.sampling.top_k >= 0, "top_k must not be negative");
    require(request.sampling.top_p > 0.f && request.sampling.top_p <= 1.f, "top_p must be in (0, 1]");
    const int most = config_.session_len - prompt;
    require(most >= (request.max_new_tokens > 0 ? 1 : 0),
            "the prompt has " + std::to_string(prompt) + " tokens, session_len is " +
                std::to_string(config_.session_len) + ": shorten it or raise session_len");
    request.max_new_tokens = std::min(request.max_new_tokens, most);
    const int blocks = ceil_div(prompt + request.max_new_tokens, config_.block_len);
    require(blocks <= config_.cache_block_count, "the request needs " + std::to_string(blocks) +
                                                     " KV blocks, the cache has " +
                                                     std::to_string(config_.cache_block_count));
    return gateway_.submit(std::move(request));
}

Metrics Engine::metrics() const {
    std::lock_guard lock(metrics_mutex_);
    return published_;
}

void Engine::run() {
    while (true) {
        // Wait only when there is nothing to plan: no work at all, or the queue to the executor is full.
        bool progress = false;
        if (in_flight_ < kStepsInFlight) {
            if (auto batch = scheduler_.schedule(in_flight_)) {
                executor_->push(std::move(batch));
                ++in_flight_;
                ++counters_.steps;
                progress = true;
            } else if (in_flight_ == 0) {
                if (Sequence* sequence = scheduler_.stuck()) {
                    fail(*sequence, "the request does not fit the KV cache");
                    progress = true;
                }
            }
        }
        publish_metrics();
        Gateway::Events events = gateway_.pop(!progress);
        accept(std::move(events.requests));
        cancel_marked(events.cancels);
        for (auto& batch : events.results) {
            --in_flight_;
            counters_.recorded_steps += batch->recorded;
            update(*batch);
        }
        if (events.closed) {
            for (Sequence* sequence : scheduler_.all()) {
                Output output;
                output.id = sequence->id();
                if (!sequence->finished) finish(*sequence, Finish::Cancelled, output);
            }
        }
        scheduler_.retire();
        publish_metrics();  // before the clients hear of it: whoever saw the last output sees its blocks free
        notify();
        if (events.closed && in_flight_ == 0) return;
    }
}

void Engine::accept(std::vector<Request> requests) {
    for (auto& request : requests) {
        counters_.prompt_tokens += int64_t(request.token_ids.size());
        scheduler_.add(std::make_unique<Sequence>(std::move(request)));
    }
}

void Engine::cancel_marked(const std::vector<uint64_t>& ids) {
    for (const uint64_t id : ids) {
        Sequence* sequence = scheduler_.find(id);
        if (!sequence || sequence->finished) continue;
        Output output;
        output.id = id;
        finish(*sequence, Finish::Cancelled, output);
    }
}

void Engine::update(const BatchData& batch) {
    for (size_t i = 0; i < batch.slices.size(); ++i) {
        const Slice& slice = batch.slices[i];
        Sequence& sequence = *scheduler_.find(slice.sequence);  // kept while a step reads it
        --sequence.steps_in_flight;
        sequence.samples_in_flight -= slice.sample;
        if (sequence.finished) continue;
        if (!batch.error.empty()) {
            counters_.healthy = false;
            fail(sequence, batch.error);
        } else {
            take_result(sequence, slice, batch, i);
        }
    }
}

void Engine::take_result(Sequence& sequence, const Slice& slice, const BatchData& batch, size_t index) {
    if (slice.sample && !batch.samples[index].finite) {
        fail(sequence, "the model's logits are not finite");
        return;
    }
    Output output;
    output.id = sequence.id();
    if (slice.return_logits) {
        // A recomputed prompt repeats positions that were already delivered, and may run past the prompt.
        const int begin = std::max(slice.context, sequence.logits_delivered);
        const int end = std::min(slice.context + slice.length, sequence.prompt_length());
        if (end > begin) {
            const auto first =
                batch.logits[index].begin() + int64_t(begin - slice.context) * model_.vocab_size;
            output.logits =
                std::make_shared<std::vector<float>>(first, first + int64_t(end - begin) * model_.vocab_size);
            output.logits_rows = end - begin;
            sequence.logits_delivered = end;
        }
    }
    if (slice.sample) {
        take_token(sequence, batch.samples[index].token, output);
    } else if (sequence.request.max_new_tokens == 0 &&
               slice.context + slice.length == sequence.prompt_length()) {
        finish(sequence, Finish::Length, output);
    } else if (output.logits_rows > 0) {
        outputs_.push_back(std::move(output));
    }
}

void Engine::take_token(Sequence& sequence, int token, Output& output) {
    const auto& stops = sequence.request.stop_token_ids;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
        finish(sequence, Finish::Stop, output);
        return;
    }
    sequence.tokens.push_back(token);
    ++counters_.generated_tokens;
    output.token_ids.push_back(token);
    if (sequence.generated() >= sequence.request.max_new_tokens) {
        finish(sequence, Finish::Length, output);
    } else {
        outputs_.push_back(std::move(output));
    }
}

void Engine::finish(Sequence& sequence, Finish reason, Output& output) {
    scheduler_.note_finished(sequence);
    sequence.finished = true;
    output.finish = reason;
    outputs_.push_back(std::move(output));
}

void Engine::fail(Sequence& sequence, const std::string& error) {
    Output output;
    output.id = sequence.id();
    output.error = error;
    finish(sequence, Finish::Error, output);
}

void Engine::notify() {
    if (outputs_.empty()) return;
    signals_.push(std::move(outputs_));
    outputs_.clear();
}

void Engine::publish_metrics() {
    counters_.waiting = scheduler_.waiting();
    counters_.running = scheduler_.running();
    counters_.total_blocks = scheduler_.pool().total();
    counters_.free_blocks = scheduler_.pool().available();
    counters_.preemptions = scheduler_.preemptions();
    std::lock_guard lock(metrics_mutex_);
    published_ = counters_;
}

}  // namespace turbomill
