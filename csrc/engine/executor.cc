#include "engine/executor.h"

#include <chrono>
#include <exception>
#include <future>
#include <utility>

#include "core/thread_name.h"

namespace turbomill {
namespace {

constexpr size_t kMostIssued = 2;
// How long to wait for the next step before looking whether the one that runs is done. Only a step that has
// no successor yet is ever noticed late by this.
constexpr auto kPatience = std::chrono::microseconds(20);

}  // namespace

ModelExecutor::ModelExecutor(StepRunner runner, Done done)
    : runner_(std::move(runner)), done_(std::move(done)), thread_([this] { run(); }) {}

ModelExecutor::~ModelExecutor() {
    queue_.close();
    thread_.join();
}

void ModelExecutor::run() {
    name_thread("tm-executor");
    while (true) {
        if (issued_.size() == kMostIssued || (!issued_.empty() && runner_.ready())) {
            complete_oldest();
        } else if (issued_.empty()) {
            auto work = queue_.pop();
            if (!work) return;  // closed, and nothing is left
            if (work->batch) {
                issue(std::move(work->batch));
            } else {
                work->task();
            }
        } else if (auto work = queue_.pop_within(kPatience)) {
            issue(std::move(work->batch));
        }
    }
}

void ModelExecutor::call(const std::function<void()>& task) {
    // Owned by both: set_value() may still be at work when the waiting thread goes on.
    const auto done = std::make_shared<std::promise<void>>();
    auto result = done->get_future();
    queue_.push({nullptr, [done, task] {
                     try {
                         task();
                         done->set_value();
                     } catch (...) {
                         done->set_exception(std::current_exception());
                     }
                 }});
    result.get();
}

void ModelExecutor::issue(std::unique_ptr<BatchData> batch) {
    try {
        runner_.issue(*batch);
        issued_.push_back(std::move(batch));
    } catch (const std::exception& error) {
        batch->error = error.what();
        while (!issued_.empty()) complete_oldest();  // steps go back in order
        done_(std::move(batch));
    }
}

void ModelExecutor::complete_oldest() {
    std::unique_ptr<BatchData> batch = std::move(issued_.front());
    issued_.erase(issued_.begin());
    try {
        runner_.complete();
    } catch (const std::exception& error) {
        batch->error = error.what();
    }
    done_(std::move(batch));
}

}  // namespace turbomill
