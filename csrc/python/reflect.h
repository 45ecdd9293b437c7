// Binds a struct whose fields stand in an X-macro: keyword constructor, properties, to_dict.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

namespace turbomill::python {

// Fields<Struct>::each(f) calls f(name, member pointer) for every field.
template <class Struct>
struct Fields;

// FIELDS is the struct's X-macro; TM_FIELD_OF_<Struct> must expand one entry to f(#name, &Struct::name);
#define TM_REFLECT(Struct, FIELDS)       \
    template <>                          \
    struct Fields<Struct> {              \
        template <class F>               \
        static void each(F&& f) {        \
            FIELDS(TM_FIELD_OF_##Struct) \
        }                                \
    };

template <class Struct, class Class>
void bind_fields(Class& cls) {
    namespace py = pybind11;
    cls.def(py::init([](const py::kwargs& fields) {
        Struct value;
        for (const auto& [key, field] : fields) {
            bool known = false;
            const std::string name = py::cast<std::string>(key);
            Fields<Struct>::each([&](const char* field_name, auto member) {
                if (name != field_name) return;
                known = true;
                using Type = std::decay_t<decltype(value.*member)>;
                try {
                    value.*member = py::cast<Type>(field);
                } catch (const py::cast_error&) {
                    throw py::type_error(name + ": wrong type " + std::string(py::str(py::type::of(field))));
                }
            });
            if (!known) throw py::type_error("unknown field '" + name + "'");
        }
        return value;
    }));
    Fields<Struct>::each([&](const char* name, auto member) { cls.def_readwrite(name, member); });
    cls.def("to_dict", [](const Struct& value) {
        py::dict fields;
        Fields<Struct>::each([&](const char* name, auto member) { fields[name] = value.*member; });
        return fields;
    });
}

}  // namespace turbomill::python
