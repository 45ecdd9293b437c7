#include "engine/engine.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/thread_name.h"
#include "core/types.h"

namespace turbomill {
namespace {

// One step runs while the next is planned and queued behind it.
constexpr int kStepsInFlight = 2;
// Steps that a client's callback may fall behind before their outputs need more memory.
constexpr int kStepsUnheard = 8;

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

}  // namespace

Engine::Engine(const ModelConfig& model, const EngineConfig& config, StepRunner runner, OnOutputs on_outputs)
    : model_(model),
      config_(config),
      orchestrator_(model_, config_),
      signals_(size_t(kStepsUnheard) * config_.max_batch_size),
      on_outputs_(std::move(on_outputs)) {
    executor_ = std::make_unique<ModelExecutor>(std::move(runner), [this](std::unique_ptr<BatchData> batch) {
        gateway_.post_result(std::move(batch));
    });
    publish_metrics();
    signal_thread_ = std::thread([this] {
        name_thread("tm-signal");
        for (std::vector<Output> outputs; signals_.take(outputs);) on_outputs_(outputs);
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
    require(request.sampling.min_p >= 0.f && request.sampling.min_p <= 1.f, "min_p must be in [0, 1]");
    for (const int count : {request.sampling.logprobs, request.sampling.prompt_logprobs})
        require(count >= -1 && count <= kMostLogprobs,
                "logprobs and prompt_logprobs must be at most " + std::to_string(kMostLogprobs));
    request.rules.validate(model_.vocab_size);
    require(!request.guided || request.max_new_tokens > 0, "a guided request must generate a token");
    require(!request.guided || request.rules.allowed_token_ids.empty(),
            "allowed_token_ids cannot be given for a guided request");
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

void Engine::allow(uint64_t id, int position, std::vector<uint32_t> allowed) {
    const int words = ceil_div(model_.vocab_size, 32);
    require(allowed.empty() || int(allowed.size()) == words,
            "a token mask of " + std::to_string(allowed.size()) + " words of 32 bits, expected " +
                std::to_string(words) + " for a vocabulary of " + std::to_string(model_.vocab_size));
    if (!allowed.empty() && model_.vocab_size % 32) allowed.back() &= (1u << model_.vocab_size % 32) - 1;
    TokenMask mask{id, position, nullptr};
    if (std::any_of(allowed.begin(), allowed.end(), [](uint32_t word) { return word != 0; }))
        mask.allowed = std::make_shared<const std::vector<uint32_t>>(std::move(allowed));
    gateway_.allow(std::move(mask));
}

Metrics Engine::metrics() const {
    const auto now = std::chrono::steady_clock::now();
    const auto seconds_since = [&](std::chrono::steady_clock::time_point then) {
        return std::max(0.0, std::chrono::duration<double>(now - then).count());
    };
    Metrics metrics;
    {
        std::lock_guard lock(metrics_mutex_);
        metrics = published_;
        if (metrics.steps_in_flight > 0) metrics.stalled_seconds = seconds_since(last_progress_);
    }
    if (const auto since = gateway_.waiting_since())
        metrics.stalled_seconds = std::max(metrics.stalled_seconds, seconds_since(*since));
    return metrics;
}

void Engine::command(Command command) {
    command.done = std::make_shared<std::promise<void>>();
    auto done = command.done->get_future();
    gateway_.command(std::move(command));
    done.get();
}

bool Engine::obey() {
    while (!commands_.empty() && orchestrator_.steps_in_flight() == 0) {
        const Command command = std::move(commands_.front());
        commands_.pop_front();
        try {
            if (command.drop_blocks) orchestrator_.drop_blocks();
            if (command.on_executor) executor_->call(command.on_executor);
            paused_ = command.pause;
            publish_metrics();  // before whoever waits looks
            command.done->set_value();
        } catch (...) {
            command.done->set_exception(std::current_exception());
        }
    }
    return !paused_ && commands_.empty();
}

void Engine::run() {
    name_thread("tm-engine");
    Gateway::Events events;
    while (true) {
        // Wait only when there is nothing to plan: no work at all, or the queue to the executor is full.
        bool progress = false;
        if (obey() && orchestrator_.steps_in_flight() < kStepsInFlight) {
            if (auto batch = orchestrator_.plan()) {
                if (orchestrator_.steps_in_flight() == 1) note_progress();
                executor_->push(std::move(batch));
                progress = true;
            }
        }
        publish_metrics();
        notify();  // a request that plan() failed
        gateway_.pop(!progress, events);
        for (Request& request : events.requests) orchestrator_.accept(std::move(request));
        for (const uint64_t id : events.cancels) orchestrator_.cancel(id);
        for (auto& step : events.results) orchestrator_.take_in(std::move(step));
        if (!events.results.empty()) note_progress();
        for (const TokenMask& mask : events.masks) orchestrator_.allow(mask);
        std::move(events.commands.begin(), events.commands.end(), std::back_inserter(commands_));
        if (events.closed) orchestrator_.cancel_all();
        orchestrator_.retire();
        publish_metrics();  // before the clients hear of it: whoever saw the last output sees its blocks free
        notify();
        if (events.closed && orchestrator_.steps_in_flight() == 0) break;
    }
    for (const Command& command : commands_)
        command.done->set_exception(std::make_exception_ptr(std::runtime_error("the engine is closed")));
}

void Engine::note_progress() {
    std::lock_guard lock(metrics_mutex_);
    last_progress_ = std::chrono::steady_clock::now();
}

void Engine::notify() {
    if (!orchestrator_.outputs().empty()) signals_.put(orchestrator_.outputs());
}

void Engine::publish_metrics() {
    Metrics now = orchestrator_.metrics();
    now.paused = paused_;
    std::lock_guard lock(metrics_mutex_);
    published_ = now;
}

}  // namespace turbomill
