#include "engine/executor.h"

#include <exception>
#include <utility>

namespace turbomill {

ModelExecutor::ModelExecutor(Forward forward, Done done)
    : forward_(std::move(forward)), done_(std::move(done)), thread_([this] { run(); }) {}

ModelExecutor::~ModelExecutor() {
    queue_.close();
    thread_.join();
}

void ModelExecutor::run() {
    while (auto batch = queue_.pop()) {
        try {
            forward_(**batch);
        } catch (const std::exception& error) {
            (*batch)->error = error.what();
        }
        done_(std::move(*batch));
    }
}

}  // namespace turbomill
