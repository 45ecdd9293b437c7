#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/turbomind.h"
#include "python/reflect.h"
#include "python/register.h"
#include "python/request_fields.h"

namespace turbomill::python {

namespace py = pybind11;

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

// Bytes as words of 32 bits, the last one filled up with zeros.
std::vector<uint32_t> mask_words(const std::string_view bytes) {
    std::vector<uint32_t> words((bytes.size() + 3) / 4, 0);
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(words.data()));
    return words;
}

// A Python callable that native threads may hold and call.
class Listener {
  public:
    explicit Listener(py::function function)
        : function_(new py::function(std::move(function)), [](py::function* held) {
              const py::gil_scoped_acquire gil;
              delete held;
          }) {}

    void operator()(std::vector<Output>& outputs) const {
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
        .def_property_readonly("token_ids",
                               [](const Output& o) { return std::vector<int>(o.token >= 0, o.token); })
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
        .def(
            "allow",
            [](Turbomind& self, uint64_t id, int position, const py::bytes& mask) {
                self.engine().allow(id, position, mask_words(mask));
            },
            py::arg("request_id"), py::arg("position"), py::arg("mask"))
        .def(
            "pause", [](Turbomind& self) { self.engine().pause(); }, py::call_guard<py::gil_scoped_release>())
        .def(
            "resume", [](Turbomind& self) { self.engine().resume(); },
            py::call_guard<py::gil_scoped_release>())
        .def("sleep", &Turbomind::sleep, py::arg("level"), py::call_guard<py::gil_scoped_release>())
        .def("wake", &Turbomind::wake, py::call_guard<py::gil_scoped_release>())
        .def("update", &Turbomind::update, py::arg("tensors"), py::call_guard<py::gil_scoped_release>())
        .def("metrics", [](Turbomind& self) { return self.engine().metrics(); })
        .def("close", [](Turbomind& self) { self.close(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace turbomill::python
