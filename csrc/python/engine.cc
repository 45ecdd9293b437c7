#include <pybind11/numpy.h>

#include <memory>
#include <utility>

#include "engine/turbomind.h"
#include "python/reflect.h"
#include "python/register.h"

namespace turbomill::python {

namespace py = pybind11;

namespace {

// A request's fields as Python names them.
struct RequestFields {
#define TM_REQUEST_FIELDS(X)                        \
    X(std::vector<int>, token_ids, {})              \
    X(int, max_new_tokens, 0)                       \
    X(float, temperature, 0.f)                      \
    X(int, top_k, 0)                                \
    X(float, top_p, 1.f)                            \
    X(float, min_p, 0.f)                            \
    X(uint64_t, seed, 0)                            \
    X(int, logprobs, -1)                            \
    X(int, prompt_logprobs, -1)                     \
    X(std::vector<int>, stop_token_ids, {})         \
    X(bool, return_logits, false)                   \
    X(int, priority, 0)                             \
    X(float, repetition_penalty, 1.f)               \
    X(float, presence_penalty, 0.f)                 \
    X(float, frequency_penalty, 0.f)                \
    X(std::vector<int>, logit_bias_ids, {})         \
    X(std::vector<float>, logit_biases, {})         \
    X(int, min_new_tokens, 0)                       \
    X(std::vector<std::vector<int>>, bad_words, {}) \
    X(std::vector<int>, allowed_token_ids, {})
#define TM_DECLARE_FIELD(type, name, value) type name = value;
    TM_REQUEST_FIELDS(TM_DECLARE_FIELD)
#undef TM_DECLARE_FIELD

    Request request() const {
        Request r;
        r.token_ids = token_ids;
        r.max_new_tokens = max_new_tokens;
        r.sampling = {temperature, top_k, top_p, seed, min_p, logprobs, prompt_logprobs};
        r.stop_token_ids = stop_token_ids;
        r.return_logits = return_logits;
        r.priority = priority;
        r.rules = {repetition_penalty, presence_penalty, frequency_penalty, logit_bias_ids,
                   logit_biases,       min_new_tokens,   bad_words,         allowed_token_ids};
        return r;
    }
};
}  // namespace

#define TM_FIELD_OF_Metrics(type, name, value) f(#name, &Metrics::name);
#define TM_FIELD_OF_RequestFields(type, name, value) f(#name, &RequestFields::name);
TM_REFLECT(Metrics, TM_METRICS_FIELDS)
TM_REFLECT(RequestFields, TM_REQUEST_FIELDS)

namespace {

// The rows as an array that shares the output's memory.
py::object logits_array(const Output& output) {
    if (!output.logits) return py::none();
    using Shared = std::shared_ptr<std::vector<float>>;
    const py::capsule owner(new Shared(output.logits), [](void* data) { delete static_cast<Shared*>(data); });
    const py::ssize_t rows = output.logits_rows, columns = py::ssize_t(output.logits->size()) / rows;
    return py::array_t<float>({rows, columns}, output.logits->data(), owner);
}

// A Python callable that native threads may hold and call.
class Listener {
  public:
    explicit Listener(py::function function)
        : function_(new py::function(std::move(function)), [](py::function* held) {
              const py::gil_scoped_acquire gil;
              delete held;
          }) {}

    void operator()(std::vector<Output> outputs) const {
        const py::gil_scoped_acquire gil;
        try {
            (*function_)(py::cast(std::move(outputs)));
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("turbomill on_outputs");
        }
    }

  private:
    std::shared_ptr<py::function> function_;
};

}  // namespace

void register_engine(py::module_& m) {
    py::class_<Metrics> metrics(m, "Metrics", "A snapshot of the scheduler and the pools.");
    bind_fields<Metrics>(metrics);
    py::class_<RequestFields> request(m, "Request", "One generation.");
    bind_fields<RequestFields>(request);

    py::class_<Logprobs>(m, "Logprobs", "Of a token, and of the likeliest ones in its place.")
        .def_readonly("logprob", &Logprobs::logprob)
        .def_property_readonly("top", [](const Logprobs& l) {
            std::vector<std::pair<int, float>> top;
            for (int i = 0; i < l.count; ++i) top.emplace_back(l.ids[i], l.values[i]);
            return top;
        });
    py::class_<Output>(m, "Output", "What one step gave one request.")
        .def_readonly("id", &Output::id)
        .def_readonly("token_ids", &Output::token_ids)
        .def_property_readonly("finish_reason", [](const Output& o) { return finish_name(o.finish); })
        .def_readonly("error", &Output::error)
        .def_readonly("cached_tokens", &Output::cached_tokens)
        .def_property_readonly("logits", &logits_array)
        .def_readonly("logprobs", &Output::logprobs)
        .def_readonly("prompt_logprobs", &Output::prompt_logprobs);

    py::class_<Turbomind>(m, "Engine", "Weights, cache and the engine's threads.")
        .def(py::init([](const ModelConfig& model, const std::vector<TensorRef>& tensors,
                         const EngineConfig& config, py::function on_outputs) {
                 const Listener listener(std::move(on_outputs));
                 const py::gil_scoped_release release;
                 return std::make_unique<Turbomind>(model, tensors, config, listener);
             }),
             py::arg("model"), py::arg("tensors"), py::arg("config"), py::arg("on_outputs"))
        .def(
            "submit",
            [](Turbomind& self, const RequestFields& fields) {
                return self.engine().submit(fields.request());
            },
            py::arg("request"))
        .def(
            "cancel", [](Turbomind& self, uint64_t id) { self.engine().cancel(id); }, py::arg("request_id"))
        .def("metrics", [](Turbomind& self) { return self.engine().metrics(); })
        .def("close", [](Turbomind& self) { self.close(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace turbomill::python
