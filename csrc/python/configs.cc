#include <utility>

#include "core/config.h"
#include "engine/turbomind.h"
#include "python/reflect.h"
#include "python/register.h"
#include "store/weights.h"

namespace turbomill::python {

namespace py = pybind11;

#define TM_FIELD_OF_ModelConfig(type, name, value) f(#name, &ModelConfig::name);
#define TM_FIELD_OF_EngineConfig(type, name, value) f(#name, &EngineConfig::name);
TM_REFLECT(ModelConfig, TM_MODEL_FIELDS)
TM_REFLECT(EngineConfig, TM_ENGINE_FIELDS)

void register_configs(py::module_& m) {
    py::class_<ModelConfig> model(m, "ModelConfig", "Sizes of a decoder.");
    bind_fields<ModelConfig>(model);
    model.def("variants", &ModelConfig::variants);
    m.def("require_known_variants", &require_known_variants, py::arg("model"), py::arg("backend"),
          py::arg("known"), "ValueError naming the variants of `model` that are not among `known`.");
    py::class_<EngineConfig> engine(m, "EngineConfig", "What the engine may use.");
    bind_fields<EngineConfig>(engine);

    py::class_<TensorRef>(m, "TensorRef", "Where a store's tensor lies.")
        .def(py::init([](std::string name, std::string layout, const std::string& dtype,
                         std::vector<int64_t> shape, std::string path, size_t offset, size_t nbytes) {
                 return TensorRef{std::move(name),
                                  std::move(layout),
                                  parse_dtype(dtype),
                                  std::move(shape),
                                  std::move(path),
                                  offset,
                                  nbytes};
             }),
             py::arg("name"), py::arg("layout"), py::arg("dtype"), py::arg("shape"), py::arg("path"),
             py::arg("offset"), py::arg("nbytes"))
        .def_readonly("name", &TensorRef::name);

    m.def("cache_block_bytes", &cache_block_bytes, py::arg("model"), py::arg("config"),
          "Bytes of one KV block (P tokens, all layers).");
}

}  // namespace turbomill::python
