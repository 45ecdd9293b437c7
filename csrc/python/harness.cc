// The orchestrator step by step, with the steps' results made up by the caller: what tests hold against a
// model, and what measures the orchestration alone.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

#include "engine/engine.h"
#include "python/register.h"
#include "python/request_fields.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

class Harness {
  public:
    Harness(const ModelConfig& model, const EngineConfig& config)
        : model_(model), config_(config), orchestrator_(model_, config_) {
        config_.validate();
    }

    uint64_t submit(const RequestFields& fields) {
        Request request = fields.request();
        request.id = ++last_id_;
        orchestrator_.accept(std::move(request));
        return last_id_;
    }
    void cancel(uint64_t id) {
        orchestrator_.cancel(id);
        orchestrator_.retire();
    }

    // The tokens that may come next in a guided request; empty: none, it ends.
    void allow(uint64_t id, int position, const std::vector<int>& tokens) {
        TokenMask mask{id, position, nullptr};
        if (!tokens.empty()) {
            std::vector<uint32_t> bits((model_.vocab_size + 31) / 32, 0);
            for (const int token : tokens) bits[token / 32] |= 1u << (token % 32);
            mask.allowed = std::make_shared<const std::vector<uint32_t>>(std::move(bits));
        }
        orchestrator_.allow(mask);
        orchestrator_.retire();
    }

    // The step's slices and copies, or None.
    py::object plan() {
        if (issued_.size() == 2) throw std::logic_error("two steps are in flight");
        auto batch = orchestrator_.plan();
        if (!batch) return py::none();
        py::list slices, copies;
        for (const Slice& s : batch->slices) {
            py::dict slice;
            slice["sequence"] = s.sequence;
            slice["slot"] = s.slot;
            slice["context"] = s.context;
            slice["length"] = s.length;
            slice["tokens"] = s.tokens;
            slice["blocks"] = s.blocks;
            slice["sample"] = s.sample;
            slices.append(slice);
        }
        for (const BlockCopy& copy : batch->copies) copies.append(py::make_tuple(copy.from, copy.to));
        issued_.push_back(std::move(batch));
        return py::make_tuple(slices, copies);
    }

    // Ends the oldest step: a token for each of its slices (-1: the logits were not finite), or an error.
    void complete(const std::vector<int>& tokens, const std::string& error) {
        if (issued_.empty()) throw std::logic_error("no step is in flight");
        finish(take_oldest(), tokens, error);
    }

    std::vector<Output> outputs() { return std::exchange(orchestrator_.outputs(), {}); }
    Metrics metrics() const { return orchestrator_.metrics(); }

    // Of every block: users, what is recorded in it, the block before it (-1: none, -2: not recorded), and
    // the sequence that fills it (0: none).
    py::list blocks() const {
        py::list all;
        const auto& blocks = orchestrator_.scheduler().pool().blocks();
        for (const LogicalBlock& b : blocks)
            all.append(py::make_tuple(b.users, b.tokens, b.parent ? b.parent->page : -2,
                                      b.writer ? b.writer->id() : 0));
        return all;
    }

    // Running sequences, the most urgent first: (id, pages, scheduled tokens, recorded tokens, finished).
    py::list running() const {
        py::list all;
        for (const Sequence* s : orchestrator_.scheduler().running_sequences()) {
            std::vector<int> pages;
            for (const LogicalBlock* block : s->blocks) pages.push_back(block->page);
            all.append(py::make_tuple(s->id(), pages, s->scheduled, s->recorded, s->finished));
        }
        return all;
    }

    // Mean seconds of a step (plan, take in, outputs) whose samples are all `token`, over `steps` steps, with
    // up to two in flight.
    double seconds_per_step(int steps, int token) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < steps; ++i) {
            while (issued_.size() < 2) {
                auto batch = orchestrator_.plan();
                if (!batch) break;
                issued_.push_back(std::move(batch));
            }
            if (issued_.empty()) throw std::logic_error("nothing is left to run");
            auto batch = take_oldest();
            const std::vector<int> tokens(batch->slices.size(), token);
            finish(std::move(batch), tokens, "");
            orchestrator_.outputs().clear();
            orchestrator_.metrics();
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        return took.count() / steps;
    }

  private:
    std::unique_ptr<BatchData> take_oldest() {
        auto batch = std::move(issued_.front());
        issued_.pop_front();
        return batch;
    }

    void finish(std::unique_ptr<BatchData> step, const std::vector<int>& tokens, const std::string& error) {
        BatchData& batch = *step;
        if (tokens.size() != batch.slices.size()) throw std::invalid_argument("one token for each slice");
        batch.error = error;
        batch.samples.resize(batch.slices.size());
        for (size_t i = 0; i < batch.slices.size(); ++i)
            batch.samples[i] = {tokens[i], tokens[i] >= 0 || !batch.slices[i].sample, {}};
        orchestrator_.take_in(std::move(step));
        orchestrator_.retire();
    }

    const ModelConfig model_;
    const EngineConfig config_;
    Orchestrator orchestrator_;
    std::deque<std::unique_ptr<BatchData>> issued_;
    uint64_t last_id_ = 0;
};

// Mean seconds of a step of a whole engine, threads and queues included, whose model takes no time: `batch`
// requests of `tokens` tokens each.
double seconds_per_step_with_threads(const ModelConfig& model, const EngineConfig& config, int batch,
                                     int tokens) {
    const py::gil_scoped_release release;
    std::deque<BatchData*> issued;
    const StepRunner runner{[&](BatchData& b) {
                                b.samples.assign(b.slices.size(), {9, true, {}});
                                issued.push_back(&b);
                            },
                            [] { return true; }, [&] { issued.pop_front(); }};
    std::mutex mutex;
    std::condition_variable ended;
    int open = batch;
    Engine engine(model, config, runner, [&](std::vector<Output>& outputs) {
        const std::lock_guard lock(mutex);
        for (const Output& output : outputs) open -= output.finish != Finish::None;
        if (open == 0) ended.notify_one();
    });
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < batch; ++i) {
        Request request;
        request.token_ids = {1 + i % (model.vocab_size - 1)};
        request.max_new_tokens = tokens;
        engine.submit(std::move(request));
    }
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return open == 0; });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return took.count() / double(engine.metrics().steps);
}

// Metrics::stalled_seconds while a step is held for `held` seconds, after it, and while nothing runs.
std::tuple<double, double, double> stalled_seconds(const ModelConfig& model, const EngineConfig& config,
                                                   double held) {
    const py::gil_scoped_release release;
    std::promise<void> let_go;
    const auto gone = let_go.get_future().share();
    const StepRunner runner{[&](BatchData& b) {
                                gone.wait();
                                b.samples.assign(b.slices.size(), {9, true, {}});
                            },
                            [] { return true; }, [] {}};
    std::promise<void> ended;
    Engine engine(model, config, runner, [&](std::vector<Output>& outputs) {
        for (const Output& output : outputs)
            if (output.finish != Finish::None) ended.set_value();
    });
    Request request;
    request.token_ids = {1};
    request.max_new_tokens = 3;
    engine.submit(std::move(request));
    std::this_thread::sleep_for(std::chrono::duration<double>(held));
    const double during = engine.metrics().stalled_seconds;
    let_go.set_value();
    ended.get_future().wait();
    const double after = engine.metrics().stalled_seconds;
    while (engine.metrics().running > 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::duration<double>(held));
    return {during, after, engine.metrics().stalled_seconds};
}

}  // namespace

void register_harness(py::module_& parent) {
    py::module_ m = parent.def_submodule("harness", "The engine's decisions without its threads, for tests.");
    m.def("seconds_per_step_with_threads", &seconds_per_step_with_threads, py::arg("model"),
          py::arg("config"), py::arg("batch"), py::arg("tokens"));
    m.def("stalled_seconds", &stalled_seconds, py::arg("model"), py::arg("config"), py::arg("held"));
    py::class_<Harness>(m, "Harness", "An orchestrator whose steps the caller makes up.")
        .def(py::init<const ModelConfig&, const EngineConfig&>(), py::arg("model"), py::arg("config"))
        .def("submit", &Harness::submit, py::arg("request"))
        .def("cancel", &Harness::cancel, py::arg("request_id"))
        .def("allow", &Harness::allow, py::arg("request_id"), py::arg("position"), py::arg("tokens"))
        .def("plan", &Harness::plan)
        .def("complete", &Harness::complete, py::arg("tokens"), py::arg("error") = "")
        .def("outputs", &Harness::outputs)
        .def("metrics", &Harness::metrics)
        .def("blocks", &Harness::blocks)
        .def("running", &Harness::running)
        .def("seconds_per_step", &Harness::seconds_per_step, py::arg("steps"), py::arg("token"));
}

}  // namespace turbomill::python
