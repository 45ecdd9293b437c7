#include "python/register.h"

PYBIND11_MODULE(_core, m) {
    m.doc() = "Turbomill's native engine.";
    turbomill::python::register_system(m);
    turbomill::python::register_configs(m);
    turbomill::python::register_engine(m);
    turbomill::python::register_repack(m);
    turbomill::python::register_harness(m);
    turbomill::python::register_kernels(m);
    turbomill::python::register_kernels_cuda(m);
}
